"""Models without weights, and how chosen parameters get their values."""
