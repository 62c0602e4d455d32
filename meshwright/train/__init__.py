"""Training: `Trainer`, `parallelize`, `verify` and `measure`, and the code that they share.

trainer                `Trainer`
arguments              `TrainingArguments`
parallelize            `parallelize`: your own training loop
prepared               `prepare`: capture, cut, check and schedule, once
prepare_for_trainer    the same for a Trainer
trainer_jobs           jobs that a Trainer sends to ranks
job_file               a training job as a TOML file or flags
measure                `measure`
inputs/                checks of arguments
models/                models by name
setup/                 steps of `prepare`; where a plan becomes a schedule
data/                  data sets and the rows of a step
loss/                  losses of Hugging Face
optimizer/             optimizers and learning rates
session/               one rank of a training run
loop/                  training and evaluation loops
checkpoint/            checkpoints and exports
verify/                comparison with one process
profiling/             costs of layers
auto/                  `parallel="auto"`
"""
