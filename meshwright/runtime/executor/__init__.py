"""The loop over a worker's list, and what each action does.

executor           the loop: receive, compute, send
actions            the interface of actions, and the slots of values
train_actions      forward, backward, sync, update
row_flow           rows of each microbatch and message
row_slices         how rows are cut for halves and teams
parameter_tours    parameters that are sent from worker to worker (cyclic)
"""
