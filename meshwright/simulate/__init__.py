"""(Schedule, costs, cluster) -> Timeline: one engine, and a compiled fast path that must agree with it."""

from meshwright.simulate.engine import simulate

__all__ = ["simulate"]
