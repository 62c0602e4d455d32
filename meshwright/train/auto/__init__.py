"""`parallel="auto"`: the plan of a run is chosen at its start, and its prediction is compared with the run.

auto_plan       measures, profiles and searches
found_devices   compares a named cluster with the devices of a run
plan_refusal    why a plan cannot run a model
planned_inputs  compares what a plan file was made for with a run
"""
