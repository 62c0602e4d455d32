"""Start ranks: local processes, or processes that torchrun has started."""
