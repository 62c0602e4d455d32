"""What is done before training starts: inputs are checked, the model is captured, cut and compared."""
