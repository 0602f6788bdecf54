"""What a block computes: its symbolic ATen graph, its saved tensors, and programs that rebuild them.

Takes modules and one example call; gives `BlockGraph` (values, ops, slots, stages) and recovery programs. Imports
torch, `errors` and nothing of the other rooms: the profiler and the runtime stand on it.
"""
