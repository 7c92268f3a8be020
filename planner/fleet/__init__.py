"""Months of a job on a cluster that fails, simulated."""
