"""Seconds that offloading to host memory or to disk adds to a step."""

from __future__ import annotations

from dataclasses import dataclass

from hardware_db.device import Device
from hardware_db.units import GB
from planner.cluster import Cluster
from planner.job import Job
from planner.timing.compute import Passes
from planner.timing.layout import Layout
from planner.timing.overlap import exposed_seconds

PCIE_X16_BYTES_PER_S = {3: 12 * GB, 4: 24 * GB, 5: 55.4 * GB, 6: 55.4 * GB}
"""Host-to-device copies over sixteen lanes by generation: `pcie*-x16` of the link catalogue; 6 is not measured."""

CPU_ADAM_PARAMETERS_PER_S = 10e9 / 2.57
TORCH_CPU_ADAM_PARAMETERS_PER_S = 10e9 / 14.76
"""AdamW of 10B parameters on a DGX-2: DeepSpeedCPUAdam and torch (ZeRO-Offload, arXiv 2101.06840).

Both times are recalled from its table of CPU-Adam latencies and were not rechecked.
"""

CPU_ADAM_CORES = 48
"""Cores of that host."""

NVME_BYTES_PER_S = 3 * GB
"""One data-centre drive's sequential rate, a conservative figure for a node whose disks nobody measured."""

OPTIMIZER_STATE_BYTES = 12
"""fp32 master copy and two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCost:
    """Seconds per step: transfers that stay visible, and the optimizer on the CPU (0 without offload)."""

    transfers: float = 0.0
    cpu_optimizer: float = 0.0


def host_link_bytes_per_s(cluster: Cluster) -> float:
    """Host-device copy rate of one rank."""
    return (
        cluster.rates.host_link_bytes_per_s or _datasheet_link_bytes_per_s(cluster.device)
    ) * cluster.factors.host_link


def _datasheet_link_bytes_per_s(device: Device) -> float:
    if device.pcie_generation is None:
        # Without PCIe host and device share one memory.
        return (device.memory_bandwidth_gbs or 12) * GB
    generation = min(max(int(device.pcie_generation), 3), 6)
    return PCIE_X16_BYTES_PER_S[generation] * (device.pcie_lanes or 16) / 16


def cpu_optimizer_rate(job: Job) -> float:
    """Parameters per second that one rank's share of the node's cores updates."""
    cluster, factor = job.cluster, job.cluster.factors.cpu_optimizer
    if cluster.rates.cpu_optimizer_parameters_per_s:
        return cluster.rates.cpu_optimizer_parameters_per_s * factor
    cores = cluster.host_cores_per_node or CPU_ADAM_CORES
    whole = CPU_ADAM_PARAMETERS_PER_S if job.configuration.backend == "deepspeed" else TORCH_CPU_ADAM_PARAMETERS_PER_S
    return factor * whole * min(1.0, cores / CPU_ADAM_CORES) / cluster.gpus_per_node


def offload_cost(job: Job, where: Layout, passes: Passes) -> OffloadCost:
    """What offload adds to one step, given the compute of one micro-batch on one rank.

    Gradients leave behind the backward; updated parameters return in the open. Offloaded parameters stream in for every
    forward and backward, behind compute. Disk traffic of the states is shared by the ranks of a node.
    """
    offload = job.configuration.offload
    if offload == "none":
        return OffloadCost()
    link = host_link_bytes_per_s(job.cluster)
    steps = job.configuration.gradient_accumulation_steps
    behind = passes.backward + passes.recomputed
    gradients = exposed_seconds(behind, where.owned * where.reduce_bytes / link) * steps
    transfers = gradients
    if offload == "optimizer":
        transfers += where.owned * where.gather_bytes / link
    else:
        stream = where.owned * where.gather_bytes / link
        transfers += steps * (exposed_seconds(passes.forward, stream) + exposed_seconds(behind, stream))
    if offload == "nvme":
        states = 2 * OPTIMIZER_STATE_BYTES * where.owned * job.cluster.gpus_per_node
        parameters = 2 * steps * where.gather_bytes * where.owned * job.cluster.gpus_per_node
        transfers += (states + parameters) / NVME_BYTES_PER_S
    return OffloadCost(transfers=transfers, cpu_optimizer=where.owned / cpu_optimizer_rate(job))
