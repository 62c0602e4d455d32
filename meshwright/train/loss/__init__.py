"""The loss of a Trainer: how Hugging Face counts labels, and whether microbatches add up to the loss of a batch.

The rule that weights the losses is in `runtime/stage/objective.py`.

loss_functions     labels that count, and the user's loss functions
loss_additivity    whether microbatch losses add up
"""
