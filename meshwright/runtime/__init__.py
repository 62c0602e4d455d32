"""Run a proved schedule on torch.distributed. It runs the same lists that were checked, drawn and simulated."""
