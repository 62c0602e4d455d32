"""The collectives of one rank of a grid, over process groups, threads, or alone."""
