"""One rank of a run: training and evaluation of a lowered schedule."""
