"""Optimizers and learning-rate schedules for a model that is split over ranks.

ZeRO, which divides the state of an optimizer among ranks, is in `runtime/parameters/`.

make_optimizer        from the arguments of Hugging Face
shared_rates          many optimizers with one set of learning rates
used_optimizer        what an optimizer of the user would lose
elementwise           optimizers that are known to update each element by itself
coupled_parameters    whether an optimizer couples parameters
optimizer_facts       options and counters as JSON
"""
