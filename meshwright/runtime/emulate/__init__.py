"""Emulated devices: timed waits instead of compute, with real messages."""
