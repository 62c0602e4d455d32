"""The work before training starts: check the inputs, capture the model, cut it into stages, and compare it."""
