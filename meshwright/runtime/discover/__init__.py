"""Measure a machine or a cluster: what its devices compute, and what their links carry."""
