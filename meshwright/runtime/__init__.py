"""Runs a proved schedule on torch.distributed: the same lists that were checked, drawn and simulated.

engine/             one rank of a run: training and evaluation
program             compiles a list of actions into instructions
executor/           the loop over instructions: receive, compute, send
stage/              forward, backward and loss of a stage
parameters/         parameters, gradients, ZeRO, clipping, update
transport/          messages between ranks
mesh                ranks, workers, process groups
launch/             starts local workers or joins torchrun
watchdog/           which rank failed or hangs
tracing/            measured timelines
emulate/            timed waits instead of compute
discover/           measures devices and links
device              what depends on the device type
cpu_scheduling      scheduling policy of CPU workers
preload             imports before workers are forked
json_exchange       values between ranks as JSON
broadcast_tensor    broadcast with different strides
started_ranks       numbers of processes, for messages to users
recent              a cache of limited size
"""
