"""Tensor, sequence, pipeline, context and expert parallelism: one mesh, and modules that hold their own part."""
