"""Emulated devices: timed waits in place of compute, with real messages."""
