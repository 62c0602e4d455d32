"""Measured timelines: one clock for all ranks, and a record of every action."""
