"""Cluster: the devices, links and hosts a plan may use."""

from __future__ import annotations

from dataclasses import dataclass

from hardware_db.device import Device, Link
from planner.factors import SHIPPED, Factors


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of this machine, which replace datasheet figures where they are not None.

    FLOP/s of large matrix products in the compute dtype, bytes/s of device memory and of host-device copies, bus
    bandwidth of collectives in bytes/s and their latency in seconds, parameters/s of the CPU optimizer.
    """

    matmul_flops: float | None = None
    memory_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None
    collective_bytes_per_s: float | None = None
    collective_latency_s: float | None = None
    cpu_optimizer_parameters_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`nodes` equal nodes of `gpus_per_node` devices.

    `capacity_bytes` is what one process may use on one device (free now, where the machine was probed). `assumed` is
    the sentence that says what was taken for granted, empty when everything was asked for or probed. `factors` is what
    calibration found.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    capacity_bytes: int
    intra_link: Link | None = None
    inter_link: Link | None = None
    nics_per_node: int = 1
    host_memory_bytes_per_node: int = 0
    host_cores_per_node: int = 0
    nvme_bytes_per_node: int = 0
    node_type: str = ""
    assumed: str = ""
    probed: bool = False
    rates: Rates = Rates()
    factors: Factors = SHIPPED

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
