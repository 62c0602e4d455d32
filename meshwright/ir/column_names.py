"""The names of the columns of a batch."""

TARGETS = ("labels", "label", "targets", "target", "y")
"""Names of a target, as a key of a batch or as an argument of `forward`."""
