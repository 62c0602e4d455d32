"""Builds models without weights, and fills chosen parameters with their values."""
