"""Copies of parameters and gradients around a strategy's collectives, in bytes per step of one rank.

Counted call by call from the sources of torch 2.13 (`fsdp/_fully_shard/_fsdp_collectives.py`, `nn/parallel`) and
DeepSpeed 0.19 (`runtime/zero/stage_1_and_2.py`, `stage3.py`). A copy reads and writes, so it moves twice its bytes.
"""

from __future__ import annotations

from hardware_db.records import dataclass
from hardware_db.units import MIB
from planner.cost.precision import recipe_of
from planner.cost.timing.efficiency import DeviceRates
from planner.cost.timing.layout import Layout
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES, MIXED_PRECISIONS

AUTOCAST_BYTES = 12
"""Autocast casts fp32 weights for the forward (4 + 2) and 16-bit weight gradients back (2 + 4) in every micro-batch."""

BUCKET_COPY_BYTES = 16
"""DDP copies every fp32 gradient into its bucket and back (`gradient_as_bucket_view` is off by default)."""

FRESH_BYTES = 64 * MIB
"""A size that glibc's allocator always asks the operating system for (its `mmap` threshold never exceeds 32 MiB)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Bytes read and written, and those of them that land in memory just allocated.

    The second kind costs a CPU a page fault per page on top; a GPU's allocator hands the same memory out again.
    """

    moved: float = 0.0
    fresh: float = 0.0

    def __add__(self, other: Copies) -> Copies:
        return Copies(moved=self.moved + other.moved, fresh=self.fresh + other.fresh)

    def __mul__(self, factor: float) -> Copies:
        return Copies(moved=self.moved * factor, fresh=self.fresh * factor)


def copy_seconds(copies: Copies, rates: DeviceRates) -> float:
    """Seconds of copies on this device."""
    return copies.moved / rates.memory_bytes_per_s + copies.fresh * _fault_seconds_per_byte(rates)


def _fault_seconds_per_byte(rates: DeviceRates) -> float:
    """Return what a byte just allocated costs beyond one that was there before; 0 where it was not measured."""
    new, old = rates.measured.clone, rates.measured.memory
    if new is None or old is None:
        return 0.0
    work = 2.0 * FRESH_BYTES
    return max(0.0, new.seconds(work) - old.seconds(work)) / FRESH_BYTES / rates.factors.memory


def copies_of(job: Job, where: Layout, rates: DeviceRates) -> Copies:
    """All copies of one step."""
    copies = _around_collectives(job, where, rates)
    return copies + _streamed(job, where) * job.configuration.gradient_accumulation_steps if rates.serial else copies


def _streamed(job: Job, where: Layout) -> Copies:
    """Return a micro-batch's weights moved through a CPU's caches, which hold them in a benchmark of products alone.

    Weights are read in the forward and in the backward, their gradients written there (a write reads the line first).
    The embedding's gradient is zeros with a few rows filled in, made anew, and added to the head's where they are tied.
    """
    tied = job.facts.tie_word_embeddings
    width = where.gather_bytes
    weights = where.parameters - (0.0 if tied else where.embedding)
    rows = Copies(moved=width + (3.0 * width if tied else 0.0), fresh=width) * where.embedding
    return Copies(moved=4.0 * width * weights) + rows


def _around_collectives(job: Job, where: Layout, rates: DeviceRates) -> Copies:
    configuration = job.configuration
    steps = configuration.gradient_accumulation_steps
    mixed = configuration.precision in MIXED_PRECISIONS
    accumulated = _accumulated(job, where) * (steps - 1)
    if configuration.strategy in FSDP_STRATEGIES:
        return accumulated + (_fully_sharded(job, where, rates) * steps if where.shards > 1 else Copies())
    if configuration.zero_stage == 3:
        return accumulated + (_partitioned(where, rates) * steps if where.shards > 1 else Copies())
    if configuration.zero_stage:
        rounds = steps if configuration.zero_stage == 2 else 1
        return accumulated + (_bucketed(where) * rounds + _flat_step(where) if rates.serial else Copies())
    bucketed = BUCKET_COPY_BYTES if configuration.strategy == "ddp" and where.replica_group.size > 1 else 0
    cast = _autocast_bytes(job, where) * steps if mixed else 0
    return accumulated + Copies(moved=(bucketed * where.trained + cast) * where.parameters)


def _autocast_bytes(job: Job, where: Layout) -> float:
    """Per parameter: frozen ones are cast for the forward alone, and not at all where they are loaded in 16 bits."""
    if where.trained == 1:
        return AUTOCAST_BYTES
    frozen = AUTOCAST_BYTES / 2 if recipe_of(job).frozen_width == 4 else 0.0
    return AUTOCAST_BYTES * where.trained + frozen * (1 - where.trained)


def _accumulated(job: Job, where: Layout) -> Copies:
    """Return the copies of a gradient added to those of earlier micro-batches: two reads, a write."""
    sharded_gradients = job.configuration.zero_stage in (2, 3)
    return Copies(moved=3 * where.gradient_bytes * (where.local if sharded_gradients else where.parameters))


def _fully_sharded(job: Job, where: Layout, rates: DeviceRates) -> Copies:
    """Return the copies of FSDP2 in a micro-batch.

    A unit is all-gathered into one new buffer and copied out into new parameters, in the forward and again in the
    backward; its gradient is copied into a new buffer of the width that is reduced.

    Over gloo, which cannot average, that buffer is divided first.
    """
    again = 1 if job.configuration.strategy == "fsdp-grad-op" else 2
    all_gather = Copies(moved=2.0 * where.gather_bytes, fresh=2.0 * where.gather_bytes) * again
    reduced = Copies(moved=where.gather_bytes + where.reduce_bytes, fresh=where.reduce_bytes)
    divided = Copies(moved=2.0 * where.reduce_bytes if rates.serial else 0.0)
    return (all_gather + reduced + divided) * where.parameters


def _partitioned(where: Layout, rates: DeviceRates) -> Copies:
    """ZeRO-3, a micro-batch: like FSDP with one all-gather, if nothing is freed between forward and backward."""
    all_gather = Copies(moved=2.0 * where.gather_bytes, fresh=2.0 * where.gather_bytes)
    reduced = Copies(moved=4.0 * where.reduce_bytes, fresh=2.0 * where.reduce_bytes)
    return (all_gather + reduced) * where.parameters


def _bucketed(where: Layout) -> Copies:
    """Return the copies of a reduction of ZeRO-1 and 2.

    Gradients go into a bucket made anew, flattened, divided, copied back from the reduced whole twice; then there is
    the part that is kept.
    """
    width = where.reduce_bytes
    whole = Copies(moved=10.0 * width, fresh=2.0 * width) * where.parameters
    return whole + Copies(moved=2.0 * width, fresh=width) * where.local


def _flat_step(where: Layout) -> Copies:
    """ZeRO's step around the optimizer: the norm of the gradients, their scaling, the new weights copied back."""
    return Copies(moved=4.0 + 8.0 + 4.0 + where.gather_bytes) * where.owned
