"""Checks of what a user gives to a Trainer, `parallelize` or `verify`."""
