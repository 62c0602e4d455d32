"""Functions that are replaced or refused while a model is traced."""
