"""Run a proved schedule on torch.distributed: the same lists that were checked, drawn and simulated."""
