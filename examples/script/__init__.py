"""One script twice: for the Hugging Face Trainer, and for this one."""
