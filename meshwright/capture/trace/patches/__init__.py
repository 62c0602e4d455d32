"""What is replaced or refused while a model is traced."""
