"""Seconds that offloading to host memory or to disk adds to a step."""

from __future__ import annotations

from dataclasses import replace

from hardware_db.device import Device
from hardware_db.records import dataclass
from hardware_db.units import GB
from planner.cost.memory.host import parked_inputs
from planner.cost.memory.states import paged_state_bytes, states_of
from planner.cost.memory.units import trained_shards_of
from planner.cost.memory.zero.offload import stored_bytes
from planner.cost.precision import recipe_of
from planner.cost.timing.efficiency import DeviceRates
from planner.cost.timing.layout import SERIAL_SLOWDOWN, SLOWDOWN, Layout, exposed_seconds
from planner.cost.timing.optimizer import STEP_BYTES
from planner.types.cluster import Cluster
from planner.types.job import Job

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


def link_seconds(cluster: Cluster, size_bytes: float, *, to_host: bool) -> float:
    """Return the seconds of copying `size_bytes` of one rank between device and host, pinned."""
    curve = cluster.rates.device_to_host if to_host else cluster.rates.host_to_device
    curve = curve or cluster.rates.host_to_device
    if curve is not None:
        return curve.seconds(size_bytes) / cluster.factors.host_link if size_bytes else 0.0
    return size_bytes / _datasheet_link_bytes_per_s(cluster.device) / cluster.factors.host_link


def _datasheet_link_bytes_per_s(device: Device) -> float:
    if device.pcie_generation is None:
        # Without PCIe host and device share one memory.
        return (device.memory_bandwidth_gbs or 12) * GB
    generation = min(max(int(device.pcie_generation), 3), 6)
    return PCIE_X16_BYTES_PER_S[generation] * (device.pcie_lanes or 16) / 16


def cpu_optimizer_seconds(job: Job, parameters: float) -> float:
    """AdamW over one rank's parameters on its share of the node's cores.

    torch's measured rate stands for DeepSpeed's kernel times the quotient of the two published ones. Our own ZeRO steps
    with torch's fused kernel, whose rate counts where it was measured; elsewhere it is that of torch's loop over
    tensors, by the bytes that each of them moves.
    """
    cluster, configuration = job.cluster, job.configuration
    factor, fused = cluster.factors.at(cluster.speed).cpu_optimizer, cluster.rates.cpu_optimizer_fused
    steps_fused = configuration.backend == "native" and configuration.optimizer in ("adamw", "adamw-fused")
    if steps_fused and fused is not None:
        return fused.seconds(parameters) / factor
    faster = STEP_BYTES["adamw"] / STEP_BYTES["adamw-fused"] if steps_fused else 1.0
    compiled = configuration.backend == "deepspeed"
    curve = cluster.rates.cpu_optimizer
    if curve is not None:
        if compiled and not cluster.device.is_cpu:
            faster = CPU_ADAM_PARAMETERS_PER_S / TORCH_CPU_ADAM_PARAMETERS_PER_S
        return curve.seconds(parameters) / factor / faster
    cores = cluster.host_cores_per_node or CPU_ADAM_CORES
    whole = CPU_ADAM_PARAMETERS_PER_S if compiled else faster * TORCH_CPU_ADAM_PARAMETERS_PER_S
    return parameters / (factor * whole * min(1.0, cores / CPU_ADAM_CORES) / cluster.gpus_per_node)


def offload_cost(job: Job, where: Layout, hideout: float, rates: DeviceRates) -> OffloadCost:
    """Return what offload adds to one step, given the seconds of compute that no communication hides behind yet.

    Copies take turns with the collective that they come before or after, so that they share its hiding places.
    Gradients leave as they are reduced: in every micro-batch under ZeRO-2 and 3 and FSDP, once a step under ZeRO-1.
    Updated parameters return in the open, or, where they live on the host, stream in for every forward and backward.
    States on disk are read, stepped and written in turn (DeepSpeed's `pipeline_read` and `pipeline_write` are off
    unless asked for); the ranks of a node share its disk.
    """
    hideout, parked = _parked_cost(job, hideout, rates)
    if job.configuration.offload == "none":
        paged = _paging_seconds(job) if job.configuration.optimizer == "adamw-8bit-paged" else 0.0
        return OffloadCost(transfers=parked + paged)
    cost = _state_cost(job, where, hideout, rates)
    return replace(cost, transfers=cost.transfers + parked)


def _parked_cost(job: Job, hideout: float, rates: DeviceRates) -> tuple[float, float]:
    """Return the compute left to hide other copies, and the seconds that stay visible.

    Checkpointed inputs are on their way to the host and back in every micro-batch.
    """
    size = sum(count * each for count, each in parked_inputs(job, recipe_of(job)))
    if not size:
        return max(0.0, hideout), 0.0
    both = sum(link_seconds(job.cluster, size, to_host=away) for away in (True, False))
    seconds = job.configuration.gradient_accumulation_steps * both
    slowdown = SERIAL_SLOWDOWN if rates.serial else SLOWDOWN
    return max(0.0, hideout - seconds), exposed_seconds(hideout, seconds, slowdown=slowdown)


def _state_cost(job: Job, where: Layout, hideout: float, rates: DeviceRates) -> OffloadCost:
    """States, gradients and weights that offload moves."""
    configuration, cluster = job.configuration, job.cluster
    if configuration.backend == "native":
        return _native_cost(job, where, hideout, rates)
    steps = configuration.gradient_accumulation_steps
    # FSDP keeps shards in fp32 and narrows them on the device, ZeRO sends them as they are all-gathered.
    size = where.local * where.gradient_bytes
    weights, gradients = (link_seconds(cluster, size, to_host=away) for away in (False, True))
    streamed = gradients * (1 if configuration.strategy == "zero1" else steps)
    returned = weights
    if configuration.offload != "optimizer":
        if where.trained < 1:  # frozen weights come too, as they were loaded
            weights = link_seconds(cluster, where.local * where.gather_bytes, to_host=False)
        streamed, returned = streamed + 2 * steps * weights, 0.0
    slowdown = SERIAL_SLOWDOWN if rates.serial else SLOWDOWN
    transfers = exposed_seconds(hideout, streamed, slowdown=slowdown) + returned
    if configuration.offload == "nvme":
        transfers += _disk_seconds(job, where)
    return OffloadCost(transfers=transfers, cpu_optimizer=cpu_optimizer_seconds(job, where.owned))


def _native_cost(job: Job, where: Layout, hideout: float, rates: DeviceRates) -> OffloadCost:
    """Return the cost of our own ZeRO (`strategies/backends/zero/engine.py`).

    While the host steps one bucket, the weights of the last return and the states of the next are read, so that of the
    three the slowest counts, and the device steps what it kept.

    On a CPU nothing has a way to go but to a disk, and the step is the device's.
    """
    configuration, is_cpu = job.configuration, job.cluster.device.is_cpu
    away = where.owned * configuration.offload_ratio
    steps = configuration.gradient_accumulation_steps
    size = away * where.gather_bytes  # sums are brought down in the dtype in which they travel
    weights, gradients = (0.0 if is_cpu else link_seconds(job.cluster, size, to_host=host) for host in (False, True))
    streamed = gradients * (1 if configuration.strategy == "zero1" else steps)
    if configuration.offload != "optimizer" and configuration.strategy == "zero3":
        streamed, weights = streamed + 2 * steps * weights, 0.0
    stepping = 0.0 if is_cpu and configuration.offload != "nvme" else cpu_optimizer_seconds(job, away)
    disk = _native_disk_seconds(job, away) if configuration.offload == "nvme" else 0.0
    slowdown = SERIAL_SLOWDOWN if rates.serial else SLOWDOWN
    waiting = max(0.0, max(weights, disk) - stepping)
    return OffloadCost(
        transfers=exposed_seconds(hideout, streamed, slowdown=slowdown) + waiting, cpu_optimizer=stepping
    )


def _native_disk_seconds(job: Job, away: float) -> float:
    """Masters and moments, read and written once a step by all ranks of a node."""
    states = stored_bytes(job, recipe_of(job)) * away * job.cluster.gpus_per_node
    return _read_seconds(job, states) + _write_seconds(job, states)


def _disk_seconds(job: Job, where: Layout) -> float:
    """States read and written once a step, parameters read twice a micro-batch, by all ranks of a node."""
    owned = where.owned * job.cluster.gpus_per_node
    states = OPTIMIZER_STATE_BYTES * owned
    read = states + 2 * job.configuration.gradient_accumulation_steps * where.gather_bytes * owned
    return _read_seconds(job, read) + _write_seconds(job, states)


def _read_seconds(job: Job, size: float) -> float:
    curve = job.cluster.rates.disk_read
    return size / (curve.rate(size) if curve else NVME_BYTES_PER_S)


def _write_seconds(job: Job, size: float) -> float:
    curve = job.cluster.rates.disk_write
    return size / (curve.rate(size) if curve else NVME_BYTES_PER_S)


def _paging_seconds(job: Job) -> float:
    """Return the seconds of moments that the driver moved to the host to make room in the backward pass.

    They are fetched for the step and evicted again: what the device's memory is short of. Beside PCIe nothing hides it.
    """
    recipe = recipe_of(job)
    states, paged = states_of(job, recipe), paged_state_bytes(job, trained_shards_of(job))
    resident = states.parameters + states.gradients + states.optimizer + paged
    short = min(max(resident - PAGED_ROOM * job.cluster.capacity_bytes, 0.0), paged)
    return sum(link_seconds(job.cluster, short, to_host=to_host) for to_host in (False, True)) if short else 0.0


PAGED_ROOM = 0.85
"""Share of a device for what is resident, activations aside (a rule of thumb)."""
