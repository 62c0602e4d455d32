"""Measured timelines: one clock for all ranks, and a record of every action.

trace           start and end of every action
clock           one clock for all ranks
clock_offset    the offset between hosts
footprint       measured bytes of a step
counted_run     counts messages and collectives
"""
