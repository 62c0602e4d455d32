"""The work before training starts: check the inputs, capture the model, cut it into stages, and compare it.

settled_plan       resolves a plan: names, files and functions
captured_layers    the layers of a model, cut into stages
check_capture      the check at the start
build_schedule     where a plan becomes a schedule
sharded_layers     layers of a tensor-parallel rank
whole_layers       layers on whole parameters, for evaluation
own_weights        weights of the stages of this rank
saved_bytes        bytes that stages save
where              this process, local workers or torchrun
all_ranks          runs a function on all ranks
start_phases       phases of the start
delay_notes        notes on delayed gradients
"""
