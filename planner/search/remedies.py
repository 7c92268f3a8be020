"""Remedies for a request that no plan fits, each tried before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hardware_db.units import DAY_SECONDS, format_bytes, format_seconds
from planner.cost.verdict import device_limit, host_limit
from planner.search.device_counts import OnDevices, doubled
from planner.search.estimate import Priced, other_trainer
from planner.search.request import Request

Fits = Callable[[Request], Priced | None]
MOST_GPUS_TRIED = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change to the request that makes a plan fit; `flag` is how to ask for it, `plan` what then fits."""

    change: str
    flag: str
    plan: str


def remedies(request: Request, fits: Fits) -> tuple[Remedy, ...]:
    """Single changes that were tried and found to fit, cheapest first."""
    tried = (
        _cheaper_optimizer(request, fits),
        _shorter_sequence(request, fits),
        _more_memory(request, fits),
        _more_host_memory(request, fits),
        _more_gpus(request, fits),
        _model_parallel(request, fits),
    )
    return tuple(remedy for remedy in tried if remedy is not None)


def in_time_remedies(request: Request, on_devices: Iterable[OnDevices]) -> tuple[Remedy, ...]:
    """The numbers of devices on which a plan ends in time, fewest first."""
    here, asked = request.cluster.gpus, request.workload.global_batch_size

    def batch(devices: OnDevices, words: str) -> str:
        size = devices.plan.configuration.global_batch_size
        return "" if size == asked else f"{words}{size}"

    return tuple(
        Remedy(
            change=f"use {devices.gpus} GPUs instead of {here}{batch(devices, ' and a global batch of ')}:"
            f" {format_seconds((devices.bill.days or 0.0) * DAY_SECONDS)}",
            flag=f"--gpus {devices.gpus}{batch(devices, ' --global-batch ')}",
            plan=f"{devices.plan.configuration.strategy}, {format_seconds(devices.plan.time.step_seconds)} a step",
        )
        for devices in on_devices
        if devices.in_time
    )


def _remedy(change: str, flag: str, priced: Priced) -> Remedy:
    configuration = priced.job.configuration
    offload = "" if configuration.offload == "none" else f", offload {configuration.offload}"
    used = format_bytes(priced.memory.device_needed_bytes)
    plan = f"{configuration.strategy}, {configuration.activation_checkpointing} checkpointing{offload}: up to {used}"
    return Remedy(change=change, flag=flag, plan=plan)


def _cheaper_optimizer(request: Request, fits: Fits) -> Remedy | None:
    if not request.workload.optimizer.startswith("adamw") or request.workload.optimizer == "adamw-8bit":
        return None
    priced = fits(replace(request, workload=replace(request.workload, optimizer="adamw-8bit")))
    if priced is None:
        return None
    return _remedy("keep optimizer moments in 8 bits", "--optimizer adamw-8bit", priced)


def _shorter_sequence(request: Request, fits: Fits) -> Remedy | None:
    length = request.workload.sequence_length // 2
    while length >= 128:
        priced = fits(replace(request, workload=replace(request.workload, sequence_length=length)))
        if priced is not None:
            return _remedy(
                f"train on sequences of {length} instead of {request.workload.sequence_length}",
                f"--seq-len {length}",
                priced,
            )
        length //= 2
    return None


def _more_memory(request: Request, fits: Fits) -> Remedy | None:
    """The smallest device memory, to a GiB, at which something fits on the same number of GPUs."""
    here = device_limit(request.workload, request.cluster)
    low, high, found = here, here * 64, None
    while high - low > (1 << 30):
        middle = (low + high) // 2
        larger = replace(request.cluster, capacity_bytes=middle)
        priced = fits(replace(request, cluster=larger, workload=replace(request.workload, max_memory_bytes=None)))
        low, high, found = (low, middle, priced) if priced else (middle, high, found)
    if found is None:
        return None
    gigabytes = -(-high // (1 << 30))
    return _remedy(f"use GPUs with at least {gigabytes} GiB instead of {format_bytes(here)}", "--gpu NAME", found)


def _more_host_memory(request: Request, fits: Fits) -> Remedy | None:
    limit = host_limit(request.workload, request.cluster)
    if not limit:
        return None
    unlimited = replace(request.cluster, host_memory_bytes_per_node=0)
    priced = fits(replace(request, cluster=unlimited, workload=replace(request.workload, host_memory_bytes=None)))
    if priced is None:
        return None
    need = format_bytes(max(priced.memory.host_bytes_per_node, priced.memory.host_load_bytes_per_node))
    return _remedy(
        f"give each node {need} of host memory instead of {format_bytes(limit)}", "--host-memory-gb N", priced
    )


def _more_gpus(request: Request, fits: Fits) -> Remedy | None:
    """Doubling the GPUs, node by node, until something fits; the batch per GPU stays at one sample or more."""
    cluster = request.cluster
    while cluster.gpus * 2 <= MOST_GPUS_TRIED:
        cluster = doubled(cluster)
        batch = max(request.workload.global_batch_size, cluster.gpus)
        batch += -batch % cluster.gpus
        priced = fits(replace(request, cluster=cluster, workload=replace(request.workload, global_batch_size=batch)))
        if priced is not None:
            return _remedy(
                f"use {cluster.gpus} GPUs instead of {request.cluster.gpus}", f"--gpus {cluster.gpus}", priced
            )
    return None


def _model_parallel(request: Request, fits: Fits) -> Remedy | None:
    if request.allow_unrunnable:
        return None
    priced = fits(replace(request, allow_unrunnable=True))
    if priced is None:
        return None
    dims = priced.job.configuration
    return _remedy(
        f"split the layers: tp {dims.tp} x pp {dims.pp}, which {other_trainer(dims)} runs", "--all-plans", priced
    )
