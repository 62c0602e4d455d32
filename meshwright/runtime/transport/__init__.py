"""How tensors are sent from one rank to another. Each transport has its own file.

send_receive         where messages are sent and received: tensors over channels
base                 the interface of a transport
choose               chooses the transport of a run
torch_distributed    gloo and NCCL
shared_memory        CPU ranks of one host
blocking             every send blocks, for tests
pair_sum             sums of two processes through shared memory
handshake            connects processes of one host
self_test            one message over every channel at the start
faults               errors of a channel
"""
