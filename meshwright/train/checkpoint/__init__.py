"""Checkpoints that can be resumed under any plan, and exports for `from_pretrained`."""
