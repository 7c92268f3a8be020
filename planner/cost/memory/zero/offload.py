"""Offloaded states of our own ZeRO: on the device, in host memory, and on NVMe, by rank.

Source: `strategies/backends/zero/weights.py` (`load`), `offload.py`, `nvme.py`. A share of the buckets leaves the
device: their masters and moments, and with `all` and `nvme` their part of stage 3's weights. Where the device is a
CPU, its memory is the host's already: `optimizer` and `all` change nothing there, `nvme` does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hardware_db.records import dataclass
from planner.cost.memory.ledger import States
from planner.cost.memory.zero.partition import flat_partition, largest_share, tensor_partitions, trained_tensors_of
from planner.cost.precision import Recipe
from planner.cost.zero_bucket_sizes import OffloadRatio, bucket_members, native_buckets, zero_buckets
from planner.types.job import Job

# Host buffers of DeepSpeed's offload on one rank.


SWAP_BUFFERS = {"optimizer": 4, "parameters": 5}
SWAP_BUFFER_ELEMENTS = 100_000_000
"""Of the NVMe configs that `planner/emit/deepspeed.py` writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBuffers:
    """Bytes of each pinned buffer before any rounding, and of all that is not pinned."""

    pinned: tuple[float, ...]
    other: float

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return sum(self.pinned) + self.other


def zero_host_buffers(job: Job, recipe: Recipe, moments_per_parameter: float) -> HostBuffers:
    """Master weights, their gradients and moments, and the buffers that weights and gradients pass through."""
    if job.configuration.zero_stage == 3:
        return _by_tensor(job, recipe, moments_per_parameter)
    flat = flat_partition(job)
    # Stage 2 adds gradients up on the host, stage 1 unreduced on the device.
    adds_up = job.configuration.zero_stage == 2 and job.configuration.accumulates
    master = float(recipe.master * flat.size)
    accumulated = (recipe.gradient * float(flat.touched),) if adds_up else ()
    return HostBuffers(
        pinned=(master, master, recipe.weight * float(flat.size), recipe.gradient * float(flat.largest), *accumulated),
        other=moments_per_parameter * flat.size,
    )


def _by_tensor(job: Job, recipe: Recipe, moments_per_parameter: float) -> HostBuffers:
    """Stage 3: gradients of each sub-group in the master's dtype and all of them in their own; `all` adds weights."""
    buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
    local = tensor_partitions(job, buckets.persistence_threshold).local
    groups = -(-local // buckets.sub_group)
    weights = (float(recipe.weight * local),) if job.configuration.offload == "all" else ()
    return HostBuffers(
        pinned=(recipe.gradient * float(local), *weights, *[recipe.master * local / groups] * groups),
        other=(recipe.master + moments_per_parameter) * local,
    )


def swapping_buffers(job: Job, recipe: Recipe) -> HostBuffers:
    """Return stage 3's page-locked buffers with NVMe.

    They are for a sub-group's states and for some parameters, and what `max_in_cpu` leaves in host memory is there too.
    """
    buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
    local = tensor_partitions(job, buckets.persistence_threshold).local
    group = min(local, buckets.sub_group)
    table = job.facts.vocab_size * job.facts.hidden_size / job.configuration.dims.data_parallel
    parameters = SWAP_BUFFERS["parameters"] * recipe.weight * max(SWAP_BUFFER_ELEMENTS, table)
    # `aio` locks its buffers in exact size.
    return HostBuffers(
        pinned=(recipe.gradient * float(local), recipe.weight * float(group)),
        other=SWAP_BUFFERS["optimizer"] * recipe.master * group + parameters,
    )


IN_MEMORY = 3
"""Buckets whose states are in memory at once under NVMe: one is read, one is stepped, one is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSplit:
    """A rank's part in elements: `on_device` is stepped on the device, the buckets `on_host` on the host."""

    on_device: float
    on_host: tuple[float, ...]

    @property
    def local(self) -> float:
        """Elements of this rank's part."""
        return self.on_device + sum(self.on_host)

    @property
    def window(self) -> float:
        """The most of `on_host` that is in memory at once where it lives on NVMe."""
        starts = range(len(self.on_host))
        return max((sum(self.on_host[start : start + IN_MEMORY]) for start in starts), default=0.0)

    @property
    def largest(self) -> float:
        """Elements of the largest bucket."""
        return max(self.on_host, default=0.0)


def offloads(job: Job) -> bool:
    """Return whether any state leaves the device."""
    offload = job.configuration.offload
    return offload == "nvme" or (offload != "none" and not job.cluster.device.is_cpu)


def weights_are_whole(job: Job) -> bool:
    """Return whether every rank's device has all weights: stages 1 and 2, and a lone rank that keeps them."""
    configuration = job.configuration
    moves = configuration.offload in ("all", "nvme") and not job.cluster.device.is_cpu
    return configuration.zero_stage < 3 or (configuration.state_shards == 1 and not moves)


def offload_split(job: Job) -> OffloadSplit:
    """Return how the rank's part is split between device and host."""
    configuration = job.configuration
    ratio = configuration.offload_ratio if offloads(job) else 0.0
    is_cpu, hidden = job.cluster.device.is_cpu, job.facts.hidden_size
    limit = native_buckets(configuration.zero_stage, hidden_size=hidden, on_cpu=is_cpu).reduce
    sizes = _buckets(trained_tensors_of(job), limit)
    share = largest_share(job)
    offloaded = OffloadRatio(ratio)
    away = tuple(size * share for size in sizes if offloaded.takes(size))
    return OffloadSplit(on_device=sum(sizes) * share - sum(away), on_host=away)


def native_states(job: Job, recipe: Recipe, states: States) -> States:
    """Return what offload leaves of `states`; gradients that are away count as host memory."""
    if not offloads(job):
        return states
    split, width, master = offload_split(job), recipe.gather, recipe.master
    away, is_cpu, is_whole = sum(split.on_host), job.cluster.device.is_cpu, weights_are_whole(job)
    parameters = width * states.elements if is_whole else (master or width) * split.on_device
    if not is_whole and (is_cpu or job.configuration.offload == "optimizer"):
        parameters += width * away
    stored = stored_bytes(job, recipe) * away
    return replace(
        states,
        parameters=parameters,
        gradients=states.gradients * (1.0 if is_cpu else split.on_device / split.local),
        optimizer=((master if is_whole else 0) + recipe.state) * split.on_device,
        host=0.0 if is_cpu else native_host_buffers(job, recipe).total,
        nvme=stored if job.configuration.offload == "nvme" else 0.0,
    )


def native_host_buffers(job: Job, recipe: Recipe) -> HostBuffers:
    """Return a GPU rank's host memory; gradients, and weights on their way up, are page-locked by bucket."""
    split, width, swaps = offload_split(job), recipe.gather, job.configuration.offload == "nvme"
    pinned = [recipe.gradient * size for size in split.on_host] + [width * split.largest]
    # A master in the dtype of its weights is what they are copied from.
    is_source = not recipe.master and not swaps
    if _weights_are_on_host(job) or is_source:
        pinned += [width * size for size in split.on_host]
    states = recipe.state + (0 if is_source else _stepped(job, recipe))
    in_memory = split.window if swaps else sum(split.on_host)
    widened = (recipe.master or width) * split.largest
    return HostBuffers(pinned=tuple(pinned), other=states * in_memory + widened)


def stored_bytes(job: Job, recipe: Recipe) -> float:
    """Bytes per offloaded parameter of what the step reads and writes where it is stored: masters and moments."""
    return _stepped(job, recipe) + recipe.state


def window_bytes(job: Job, recipe: Recipe) -> float:
    """States of NVMe that are in a CPU's memory at the most, in the step."""
    return stored_bytes(job, recipe) * offload_split(job).window


def _weights_are_on_host(job: Job) -> bool:
    return job.configuration.offload in ("all", "nvme") and not weights_are_whole(job)


def _stepped(job: Job, recipe: Recipe) -> int:
    """Return bytes of what the optimizer changes where that is not the weights themselves.

    It is a master, or the host's copy of weights that stay on the device.
    """
    in_place = job.cluster.device.is_cpu or _weights_are_on_host(job)
    return recipe.master or (0 if in_place else recipe.gather)


@lru_cache(maxsize=256)
def _buckets(tensors: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Elements of each bucket."""
    return tuple(sum(tensors[index] for index in bucket) for bucket in bucket_members(tensors, limit))
