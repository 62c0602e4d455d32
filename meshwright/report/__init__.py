"""Output for people: terminal grids, pictures, Perfetto traces, comparisons and bottlenecks.

terminal          a timeline as a coloured grid
time_grid         rows of time that fit a width
pictures/         SVG and PNG
perfetto          a timeline as a Chrome trace
comparison        predicted against measured
critical_path     the critical path of a step
bottleneck        what a step waits for most
measured_text     a measurement as text
plan_text         a plan as text
cluster_text      a cluster as text
profile_table     a profile as a table
prediction_log    the log of predictions and measurements
progress          the progress of a run
"""
