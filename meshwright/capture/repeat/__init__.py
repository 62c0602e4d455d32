"""Captures a model with many equal blocks from a few of them, if the others are proved to be the same.

capture_for_costs    `flatten_for_costs`: the graph of a model, for costs
block_lists          finds lists of blocks that look equal, and shortens them
block_spread         where the operations of a shortened list are in the whole list
operation_log        what a model does, from a run without values
repeat_graph         repeats the nodes of one block in a graph
"""
