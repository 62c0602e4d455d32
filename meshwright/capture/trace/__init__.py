"""Traces a model into a flat graph of operations with torch.export.

export                 runs torch.export and records a flat graph
from_fx                fx graph -> flat graph
graph                  the flat graph
operations             operations by name, and those with special properties
batch_columns          which tensors of a batch the model takes
size_conditions        what a trace assumed about sizes
storages               which values share memory, and who writes
meta_stand_ins         tracing models on the meta device
autograd_functions     a user's autograd.Function as one operation
packed_sequences       several texts in one row
unsupported_modules    modules that cannot be captured
failure_reasons        why a capture failed, and what to do
patches/               functions that are replaced during tracing
"""
