"""Code that several verbs share, and parts of large verbs.

flag_groups          flags that several verbs share
mode_flags           flags of tensor modes
inputs               sizes, options and schedules from flags and files
cost_flags           times, links and files of costs
outputs              files and terminal output
running              progress and summary of a run
emulation            `simulate --emulate`
request_layers       the layers that `plan` is about
next_commands        what to run after `plan`
planned_schedule     `simulate plan.json`
comparison_table     the answer of `compare`
profile_costs        `compare --profile`
tensor_comparison    `compare --tensor`
sharded_model        `inspect` with tensor flags
"""
