"""Layers that run in pieces between their collectives."""
