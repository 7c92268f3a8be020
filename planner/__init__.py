"""Decides: arithmetic over models, workloads and clusters. No torch, no processes, no clock."""
