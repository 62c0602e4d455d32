"""The columns of a batch, by the names that people give them."""

TARGETS = ("labels", "label", "targets", "target", "y")
"""What a target is called in a mapping, or as an argument of `forward`."""
