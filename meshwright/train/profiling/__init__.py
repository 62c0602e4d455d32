"""Costs of the layers of a model: measured on this machine, or estimated for another device.

profile_model      `profile_model`
profile_request    its arguments
profile_rows       which numbers of rows a plan needs
timed_layers       times layers one by one
"""
