"""Traces a model into a flat graph of operations with torch.export."""
