"""The loss of a Trainer: how Hugging Face counts labels, and whether microbatches add up to the loss of a batch."""
