"""Sharding after capture: layouts of every value of a flat graph under a tensor mode, and local modules with collectives.

sharded          the entry: `shard_plan` settles a model, `open_plan` makes modules
settle           chooses layouts and makes local programs
layouts/         layouts of values, and the walk over a flat graph
rules/           how each operation runs on shards
emit             local programs -> modules
woven_layer      a layer that runs in pieces between collectives
woven_chain      consecutive layers in pieces, as one
row_halves       whether a microbatch can run as two halves
wide_casts       float64 instead of float32 casts, for exact comparisons
rank_memory      counts the memory of a rank
captured_rows    compares all modes for a captured model
shard_report     what was cut, replicated and moved, as text
"""
