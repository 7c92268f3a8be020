"""Micro-benchmarks: rates of this machine, measured. The modules below this package import torch."""
