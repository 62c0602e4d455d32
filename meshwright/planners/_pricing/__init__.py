"""Candidates of the planner `search` with their costs, times and memory.

pricing             costs, links and memory of a candidate, to simulate it
programs            lists of plans, kept for later searches
priced_bound        a bound that knows links
priced_plan         a candidate with its costs and its time
devices_apart       memory of stages whose devices are simulated by themselves
uncounted_memory    memory besides that of a simulation
mapping             the same plan on other devices, by swaps
pool                plans that were simulated
"""
