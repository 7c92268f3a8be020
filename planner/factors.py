"""Factors: what calibration found a machine to do, over what the shipped model expects of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Few, named, physical corrections of the time model; 1 is the shipped prior.

    Each multiplies a *rate*, so 0.9 means 10 % slower: weight products, fused attention, device memory, bus bandwidth
    inside a node and between nodes, host-device copies, the CPU optimizer, and the host's launching of kernels.
    """

    compute: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    intra_link: float = 1.0
    inter_link: float = 1.0
    host_link: float = 1.0
    cpu_optimizer: float = 1.0
    launch: float = 1.0


SHIPPED = Factors()
