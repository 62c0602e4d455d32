"""How tensors get from one worker to another; a file is a transport."""
