"""The collectives of one rank of a grid, over process groups, threads, or alone.

wires           the interface, and the log of transfers
group_wires     over torch.distributed
thread_wires    between threads, to count words and for tests
lone_wires      on a single rank, dry or delayed
"""
