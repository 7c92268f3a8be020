"""A whole training step under fake tensors: what is alive at every moment, without weights or a GPU.

The only part of the planner that imports torch beside `strategies.tracing.live`; import its modules by name where they
are needed.
"""
