"""Layers that run in pieces between their collectives, so that compute and communication overlap.

pieces           cuts a local graph at its collectives
weave            the loop over pieces, forward and backward
whole_weights    gathers weights early, scatters their gradients late
split_product    a product that can defer its weight gradient
joined_pieces    pieces of consecutive layers as one graph
"""
