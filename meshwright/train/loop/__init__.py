"""The training loop and the evaluation loop of one rank."""
