"""The intermediate representation: frozen data, no torch; every type round-trips through its file form.

action               actions, transfers and values, as text and back
schedule             one list of actions per worker
placement            which worker runs which stage
timeline             when each action runs
model                a model as a chain of layers
profile              `Profile`: costs of layers, the input of a planner
stage_cost           `StageCost`: costs of stages, the input of a simulation
cluster              devices and links
links/               links, hosts, times of collectives
plan/                what a user asks for, and what a planner chose
analysis/            dependencies, orders, lifetimes and prices of a schedule
files/               file formats
partition            cuts a chain into runs
text_grid            a schedule as a text grid
reader               strict reading of files
input_limits         limits for input files
byte_sizes           2GB, 25 GB/s, 312 TFLOPS
column_names         names of batch columns
imported_function    `package.module:function`
"""
