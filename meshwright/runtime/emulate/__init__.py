"""Emulated devices: timed waits instead of compute, with real messages.

emulate         runs schedules on emulated devices
wait_actions    timed waits as actions
durations       how long each instruction takes
"""
