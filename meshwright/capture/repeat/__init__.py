"""Captures a model with many equal blocks from a few of them, if the others are proved to be the same."""
