"""Analyses of a schedule. The runtime, the proof and the simulator share them.

effects             the dependency rule: what an entry reads and writes
named_values        the values of an action by what they are
carried_values      which values travel between workers
held_values         what a worker holds before and after its list
order               linear orders of a schedule
lifetime            how long a value lives
price               seconds of entries and bytes of values
reduction_groups    who sums gradients together
timeline_counts     counts from a timeline
"""
