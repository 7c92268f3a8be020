"""Fake tensors on the CPU that behave as CUDA tensors do, as far as memory can tell."""
