"""The training and evaluation loops of one rank."""
