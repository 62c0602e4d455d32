"""Pure functions Schedule -> Schedule: they add sync, recompute and messages that a schedule lacks; check proves the result.

lower            runs all passes in order
recompute        which stages recompute
sync             adds gradient syncs and updates
tie_updates      updates of tied weights without a flush
gathers          adds the gathers of ZeRO
messages         adds sends and receives that cannot deadlock
widen            several workers per stage
forward_only     only the forwards, for evaluation
check            the proof: runs all laws
laws             laws that need only counting
round_laws       laws of a round: S, N, U
reduction_law    every gradient is summed exactly once
value_copies     every value exists where it is read
wellformed       an object is a schedule at all
violation        names of laws and the error for a broken one
"""
