"""The parameters of a rank: versions, gradients, reduction, sharding (ZeRO), clipping and update.

parameters         all units of a rank: versions, sync, norm, clipping, update
unit               one unit: parameters that are summed and updated together
gradient_buffer    gradients of a unit and their all-reduce
zero_shares        ZeRO: slices of parameters and optimizer state; gathers
zero_gradients     ZeRO: gradients and their reduce-scatter
versions           parameter versions without a flush
absent             parameters without values here refuse writes
borrowed           parameters that another rank owns (cyclic ZeRO)
"""
