"""Data sets, samplers, collators, and the rows of a training step."""
