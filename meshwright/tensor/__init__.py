"""Tensor parallelism on local tensors, at run time. Layouts and costs are in `costs/`, sharding of models in `capture/shard/`.

line                1-D at run time (twin of `costs/line.py`)
grid                2-D
tesseract           2.5-D
box                 3-D
gathered_product    the product of every mode
moves               changes of layout and their adjoints
wires/              collectives of one rank
weave/              layers in pieces that overlap with collectives
local_ops           local computations between collectives
global_dropout      dropout on a shard
counted_words       counts the words that a mode sends
"""
