"""From a flat graph to stages: what is alive where, what layers cost, cut points, stage modules."""
