"""The training session of one rank: a model, an engine, and the state of a run.

session             `Session`: step, evaluate, save
segment             one walk: a step or several
speed               rows, tokens and FLOPs per second
generate            greedy generation
save_model          saves for `from_pretrained`
refuse_optimizer    optimizers that cannot run under this plan
model_changes       changes to a model after its capture
model_values        values and tensors of a model by path
"""
