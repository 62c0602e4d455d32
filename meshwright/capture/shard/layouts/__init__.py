"""Layouts of values, and the walk that turns a flat graph into a local program."""
