"""Schedule -> Schedule, pure: sync, recompute and comm add what a schedule has not placed; check proves the result."""
