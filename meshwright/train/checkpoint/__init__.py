"""Checkpoints that any plan resumes, and exports that from_pretrained reads."""
