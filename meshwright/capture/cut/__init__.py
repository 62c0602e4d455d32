"""Cuts a flat graph into stages: liveness, costs of layers, cut points and stage modules."""
