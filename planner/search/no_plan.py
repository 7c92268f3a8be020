"""The answer where no plan fits: headline, closest miss, and remedies, each tried before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hardware_db.records import dataclass
from hardware_db.units import DAY_SECONDS, format_bytes, format_seconds, three_digits
from planner.cluster.budget import NO_BUDGET, bill_of
from planner.cost.combinations import other_trainer
from planner.cost.precision import LOADED_BYTES, load_dtype_of
from planner.cost.verdict import device_limit, host_limit, why_it_misses
from planner.errors import ContradictoryRequest
from planner.search.device_counts import MOST_DEVICES, OnDevices, doubled
from planner.search.estimate import Priced
from planner.search.ranking import group_name
from planner.search.request import Request
from planner.types.job import counts_of
from planner.types.plan import Configuration, Plan
from planner.vocabulary import Method

Fits = Callable[[Request], Priced | None]
MOST_GPUS_TRIED = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change to the request that makes a plan fit; `flag` is how to ask for it, `plan` what then fits."""

    change: str
    flag: str
    plan: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPlan:
    """Words of commands, pages, reports and errors where there is no plan."""

    headline: str
    """`no plan fits`, or by when none that fits ends."""
    takes: str
    """How long the closest miss trains where that is what it misses by, ready to follow its name; else empty."""
    steps: tuple[str, ...]
    """The remedies, numbered; without any what to try instead."""
    sentence: str
    """All in one line, with the model and the hardware, for errors."""


def compose_no_plan(request: Request, closest: Plan | None, remedies: tuple[Remedy, ...]) -> NoPlan:
    """Return what is said of a request without a plan: `closest` misses by least, and may be one that ends too late."""
    name, hardware = request.facts.name, f"{request.cluster.gpus} x {request.cluster.device.name}"
    is_late = closest is not None and closest.verdict != "does_not_fit"
    deadline = request.budget.deadline_days
    takes = ""
    if closest is not None and is_late and deadline is not None:
        days = bill_of(closest.configuration, closest.time.step_seconds, None, request.budget).days
        takes = "" if days is None else f", {format_seconds(days * DAY_SECONDS)}"
        term = format_seconds(deadline * DAY_SECONDS)
        headline, subject = f"no plan that fits ends in {term}", f"{name} on {hardware} does not end in {term}"
        otherwise = f"no number of GPUs up to {MOST_DEVICES:,} ends in time; give it more time or fewer tokens"
    else:
        headline, subject = "no plan fits", f"{name} does not fit on {hardware}"
        otherwise = "no single change that was tried makes it fit; combine several (`dsplan max` says what fits here)"
    miss = ""
    if closest is not None:
        reason = takes or f", {why_it_misses(closest) or next(iter(closest.notes), closest.verdict)}"
        miss = f"closest is {group_name(closest.configuration)}{reason}; "
    changes = [f"{number}) {item.change} ({item.flag})" for number, item in enumerate(remedies, start=1)]
    steps = [f"  {number}. {item.change} ({item.flag}): {item.plan}" for number, item in enumerate(remedies, start=1)]
    return NoPlan(
        headline=headline,
        takes=takes,
        steps=tuple(steps) or (otherwise,),
        sentence=f"{subject}: {miss}{' '.join(changes) or otherwise}",
    )


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


MOST_GPUS_FOR_ADAPTERS = 8
"""Above that, whoever asks to train all weights has the machines for it."""
_ADAPTERS: tuple[tuple[Method, str], ...] = (
    ("lora", "train adapters beside frozen 16-bit weights"),
    ("qlora", "train adapters beside frozen 4-bit weights"),
)


def adapter_remedies(
    request: Request, first: Callable[[Request], Plan | None], instead: Plan | None
) -> tuple[Remedy, ...]:
    """Return adapters in place of all weights, where those fit on the devices alone and all weights do not.

    `instead` is the best plan for all weights, None where there is none.
    """
    workload = request.workload
    cluster = request.cluster
    if workload.freezes or cluster.device.is_cpu or cluster.gpus > MOST_GPUS_FOR_ADAPTERS:
        return ()
    offered = []
    for method, change in _ADAPTERS:
        with_adapters = replace(workload, method=method, load_dtype=None)
        try:
            counts = counts_of(request.facts, with_adapters)
        except ContradictoryRequest:
            return ()
        if (
            LOADED_BYTES[load_dtype_of(with_adapters) or "bf16"] * counts.held.total
            > cluster.gpus * cluster.capacity_bytes
        ):
            continue  # not even the frozen weights fit, shared by all
        plan = first(replace(request, workload=with_adapters, counts=counts, budget=NO_BUDGET, offload="none"))
        if plan is not None:
            offered.append(Remedy(change=change, flag=f"--method {method}", plan=_with_speed(plan, instead)))
    return tuple(offered)


def _with_speed(plan: Plan, instead: Plan | None) -> str:
    chosen = plan.configuration
    speed = f"{plan.throughput.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
    if instead is not None:
        speed += f", {three_digits(instead.time.step_seconds / plan.time.step_seconds)}x as fast as the first plan"
    used = format_bytes(plan.memory.device_needed_bytes)
    kept = "nothing recomputed in the room that is left" if chosen.activation_checkpointing == "none" else ""
    recomputed = kept or f"{chosen.activation_checkpointing} checkpointing"
    return f"{chosen.strategy}, micro-batch {chosen.micro_batch_size}, {recomputed}: up to {used}, {speed}"


def in_time_remedies(request: Request, on_devices: Iterable[OnDevices]) -> tuple[Remedy, ...]:
    """Return the numbers of devices on which a plan ends in time, fewest first."""
    here, batch_size = request.cluster.gpus, request.workload.global_batch_size

    def batch(devices: OnDevices, words: str) -> str:
        size = devices.plan.configuration.global_batch_size
        return "" if size == batch_size else f"{words}{size}"

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
    """Return the smallest device memory, to a GiB, at which something fits on the same number of GPUs."""
    here = device_limit(request.workload, request.cluster)
    low, high, fitting = here, here * 64, None
    while high - low > (1 << 30):
        middle = (low + high) // 2
        larger = replace(request.cluster, capacity_bytes=middle)
        priced = fits(replace(request, cluster=larger, workload=replace(request.workload, max_memory_bytes=None)))
        if priced is None:
            low = middle
        else:
            # What fits needs no more than it needs.
            high, fitting = max(min(middle, priced.memory.device_needed_bytes), low), priced
    if fitting is None:
        return None
    stated, billions = request.workload.max_memory_bytes, -(-high // 10**9)
    if stated and billions * 10**9 <= request.cluster.capacity_bytes:
        change = f"let a plan take {billions} GB of each GPU instead of {stated / 1e9:g}"
        return _remedy(change, f"--max-memory-gb {billions}", fitting)
    gigabytes = -(-high // (1 << 30))
    return _remedy(f"use GPUs with at least {gigabytes} GiB instead of {format_bytes(here)}", "--gpu NAME", fitting)


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
    if cluster.is_mig_slice:
        return None
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
    return _remedy(f"split {_splits(dims)}, which {other_trainer(dims)} runs", "--all-plans", priced)


def _splits(chosen: Configuration) -> str:
    """Return what ranks share of one sample's work: `the layers (tp 2 x pp 4) and the experts (ep 8)`."""
    splits = [f"the layers (tp {chosen.tp} x pp {chosen.pp})"] if chosen.tp * chosen.pp > 1 else []
    splits += [f"every sample's tokens (cp {chosen.cp})"] if chosen.cp > 1 else []
    splits += [f"the experts (ep {chosen.ep})"] if chosen.ep > 1 else []
    return " and ".join(splits) or "nothing"
