"""Training steps under fake tensors, and models read from live modules."""
