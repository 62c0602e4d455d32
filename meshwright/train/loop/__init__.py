"""The training loop and the evaluation loop of one rank.

rank_job             the data that a rank receives
on_rank              runs a job on one rank
training_loop        the training loop
segment_length       steps per walk without a flush
evaluation           the evaluation loop
callbacks            callbacks, logs and progress
report_to            tracking programs
loss_sums            losses for the log
flops                floating-point operations of a step
traced_steps         traces some steps
between_trainings    optimizer state between two `train()` calls
"""
