"""Layouts of values, and the walk that turns a flat graph into a local program.

layout             factors of each dimension and the axes that cut them
spreads            spreads of a scheme as layouts
parts              the shard of a rank, and whole tensors from shards
walk               the walk over a flat graph
walk_task          its input and its findings
steps              local programs as data
relay              moves from one layout to another
dry_steps          checks the shapes of a local program
sizes              shapes of a flat graph for one batch
learning_values    values that need a gradient
bound_arguments    arguments of an operation by name
in_place           in-place operations
without_writes     replaces writes into views
refusals           errors
"""
