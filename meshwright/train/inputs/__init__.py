"""Checks of what a user gives to a Trainer, `parallelize` or `verify`.

trainer_inputs      arguments of a Trainer
user_arguments      arguments of `parallelize` and `verify`
usable_arguments    arguments for Hugging Face
gradient_hooks      refuses gradient hooks
eval_submodules     keeps submodules in eval mode
"""
