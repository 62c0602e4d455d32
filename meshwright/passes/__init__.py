"""Pure functions Schedule -> Schedule: they add sync, recompute and messages that a schedule lacks; check proves the result."""
