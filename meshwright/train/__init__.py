"""Training: `Trainer`, `parallelize`, `verify` and `measure`, and the code that they share."""
