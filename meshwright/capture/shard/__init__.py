"""Sharding after capture: layouts of every value of a flat graph under a tensor mode, and local modules with collectives."""
