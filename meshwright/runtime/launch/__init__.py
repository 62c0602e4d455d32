"""Starts ranks as local processes, or joins the processes of torchrun.

workers           starts local workers and sends them jobs
worker_main       the loop of a local worker
torchrun          joins a torchrun job
shared_tensors    large tensors to workers through shared memory
"""
