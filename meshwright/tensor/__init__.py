"""Tensor parallelism on local tensors: wires, collectives with their adjoints, pieces between collectives; a file is a mode."""
