"""Analyses of a schedule: effects (the dependency rule), orders, lifetimes, prices."""
