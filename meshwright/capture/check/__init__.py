"""Checks that captured layers compute what the model computes: in one process, on a small example, before training starts.

start_check         the comparison: all sizes, training and evaluation
paired_runs         runs the model and its captured layers
example_sizes       small batches of several sizes
fingerprints        a tensor as a few numbers, and distances
random_streams      equal random numbers for both runs
perturbed_values    changes constant tensors, which hide differences
restore_model       restores buffers, gradients, modes and hooks afterwards
restore_weights     restores weights that a forward wrote into
first_difference    the first module that differs
likely_reasons      why it may differ, and what to do
check_result        the verdict, and the error that users see
"""
