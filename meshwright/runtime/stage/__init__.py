"""A stage: its layers, the rows of a batch, forward, backward and loss."""
