"""Costs without torch: tensor modes (one file each), stages of a plan, times and memory.

modes             finds a tensor mode by name: what a new mode must have
line              1-D (Megatron-LM)
grid              2-D (Optimus)
tesseract         2.5-D (Tesseract)
box               3-D
scheme            the vocabulary of modes: grid, spread, scheme
product_plan      how a product runs under any scheme
declared          words that a scheme sends and keeps
tensor_rows       compares all modes for one layer
planned_grid      the grid and scheme of a plan
stages            costs of the stages of a plan
gradient_sums     what sums of gradients take, tied parameters included
placed_plan       links and sums of a plan on the devices of its ranks
roofline          time of a layer on another device
memory/           memory of a plan
"""
