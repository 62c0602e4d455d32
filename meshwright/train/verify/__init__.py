"""Compare training under a plan with training in one process."""
