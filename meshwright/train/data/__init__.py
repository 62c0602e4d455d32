"""Data sets, samplers, collators, and the rows of a training step.

sampler             selects the rows of each step
step_rows           rows of a step: batch size, accumulation, copies
batches             batches of one rank
rank_source         which rows a rank loads
own_microbatches    microbatches that a rank loads in cyclic modes
collate             rows -> tensors
row_reader          rows of any data set as tensors
vocabulary          ids without a row in the embedding
named_datasets      data sets by name
"""
