"""Builds models without weights, and fills chosen parameters with their values.

sketch               `sketch`: builds a model without weights and fills chosen ones
recorder             records the operations of a build
tape                 the recorded operations, and their replay
generator_states     tracks random generators during a build
skip_random          advances a generator without a tensor
torch_functions      which torch functions draw, overwrite or create
safetensors_files    weights from files, by name
swap_tensor          replaces the content of a parameter
"""
