"""A stage: its layers, the rows of a batch, forward, backward and the weight of its loss.

stage                 forward, backward and recompute of one microbatch
objective             how losses are weighted: rows, tokens, microbatches, copies
batch                 cuts a batch into microbatches
given_batch           inputs and target of a batch
layers                a list of layers, cut into stages; units and ties
layer_inputs          inputs and outputs of a layer
layer_chains          layers that run as one
graphs_by_size        other graphs for other batch sizes
split_backward        backward in two halves (zero bubble)
split_functions       layers that can defer weight gradients
reached_parameters    which parameters get a gradient
tensor_parameters     parameter shards of a tensor-parallel rank
moving_buffers        buffers that a forward changes
precision             mixed precision and loss scaling
cpu_formats           whether this CPU computes in bf16 and fp16
"""
