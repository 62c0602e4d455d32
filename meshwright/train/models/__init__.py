"""Models by name, and example batches for them.

model_names        resolves MODEL on the command line
named_layers       captures a model by name
small_models       `mlp` and `gpt`
example_batches    batches without data
"""
