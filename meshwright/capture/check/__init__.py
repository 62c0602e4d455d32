"""Checks that captured layers compute what the model computes: in one process, on a small example, before training starts."""
