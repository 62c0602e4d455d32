"""How tensors are sent from one worker to another. Each transport has its own file."""
