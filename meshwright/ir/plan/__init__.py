"""Plans: what a user asks for (`Parallel`), what a planner chose (`Plan`), and their files.

plan             `Parallel`: what a user asks for
plan_dp          the field `dp_mode`: ZeRO and cyclic modes
plan_tensor      the fields of tensor parallelism
plan_ranks       the field `ranks`
plan_stages      compares the stages of a plan file with its `parallel`
plan_fields      other fields that take several forms
plan_order       the field `order`: a plan with its own schedule
unset_values     defaults that the user did not set
plan_file        plan files
chosen_plan      `Plan`: what a planner chose
runnable_plan    `Plan` -> `Parallel`
planned_file     files of chosen plans
"""
