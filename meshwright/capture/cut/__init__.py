"""Cuts a flat graph into layers and stages, and counts what they cost.

liveness         a flat graph as a line of operations; values alive between them
cut_points       where the line may be cut, and the layers in between
stage_modules    builds modules from parts of a flat graph
op_modules       operations as modules (Linear, Embedding, dropout)
label_counter    counts the labels that a mean loss is divided by
cost             FLOPs and saved bytes of a layer
op_work          operations and bytes by kind, for time estimates
dry_walk         bytes that layers save and send, without values
gpu_kernels      bytes that fused GPU kernels save
equal_layers     finds layers that are equal
"""
