"""Models by name, and example batches for them.

model_names        resolves MODEL on the command line
model_heads        the class of a model without `architectures`
named_layers       captures a model by name
small_models       `mlp` and `gpt`
example_batches    batches without data
"""
