"""Compare a plan with one process."""
