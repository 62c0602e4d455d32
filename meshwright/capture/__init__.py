"""From an ordinary module to a flat graph, the layers that may be cut between, and stages."""
