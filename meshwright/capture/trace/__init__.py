"""From a model to a flat graph of operations, through torch.export."""
