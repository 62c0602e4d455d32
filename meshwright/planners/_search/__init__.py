"""What the planner `search` tries: problems as arrays, candidates with bounds, their devices.

problem                layers, devices and links as arrays
effort                 how much work a search does
families               schedules that a search tries
candidate_plans        what a plan is before it is simulated
candidates             enumerates plans with bounds
bound_queue            candidates by bound, which may rise
group_bounds           bounds for groups of plans
plan_bounds            bounds of plans, and what they share
stage_seats            sums and extremes over the stages of each worker
wide_plans             plans whose stages have different widths
cuts/                  where layers are cut into stages
interchangeable        devices that can trade places, and orders of devices without such doubles
grid_layout            workers to devices
device_links           links as arrays
tensor_costs           time of tensor-parallel collectives
"""
