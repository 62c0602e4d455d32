"""What the layers of a model cost: measured here, or estimated for another device."""
