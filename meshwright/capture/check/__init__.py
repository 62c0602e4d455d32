"""Do captured layers compute what the model computes? Compared in one process, on a small example, before training starts."""
