"""The parts of the search over plans."""
