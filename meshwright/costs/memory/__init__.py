"""Memory of a plan.

memory_classes    by class: parameters, gradients, activations and others
comm_buffers      of communication on CPU workers
"""
