"""DeepSpeed's ZeRO besides weights, optimizer states and activations, moment by moment: stages 1 and 2.

Source: DeepSpeed 0.19's `runtime/zero/stage_1_and_2.py`; `zero3.py` has stage 3. Bucket sizes come from
`planner.cost.zero_bucket_sizes`. A gradient that backward makes is copied into a bucket at once, so that of a unit's
gradients only the newest is a tensor of its own. A full bucket, and the last one when backward ends, is reduced: its
slices are copied into one tensor for the all-reduce, unless one rank owns them all, and what the rank's part touches
is copied to a tensor that holds all of these gradients. The buckets are made with a micro-batch's first gradient and
freed after its last; where stage 1 accumulates, it keeps them, and unreduced gradients, to the end of the last
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.states import flat_step_temporaries
from planner.cost.memory.units import mean_width, round_up
from planner.cost.memory.zero.partition import flat_partition, tensor_partitions, trained_partitions
from planner.cost.precision import Recipe
from planner.cost.zero_bucket_sizes import zero_buckets
from planner.types.job import Job

# Buffers of DeepSpeed's ZeRO-3, moment by moment.


NORM_BYTES = 8
"""DeepSpeed takes the gradient norm tensor by tensor in fp64 (`zero/utils.py`, get_norm_dtype)."""


def offloaded_step(job: Job, size: int) -> float:
    """Return temporaries of a step in host memory, which on a CPU is the device's.

    torch's Adam runs there, and `DeepSpeedCPUAdam`, which needs none, elsewhere.
    """
    return flat_step_temporaries(job, size, 4) if job.cluster.device.is_cpu else 0.0


class PartitionedZeroBuffers:
    """Stage 3, which cuts every tensor over the ranks."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        configuration = job.configuration
        self._job, self._recipe, self._width = job, recipe, recipe.gradient
        self._limits = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
        self._tensors = tensor_partitions(job, self._limits.persistence_threshold)
        # Of frozen weights there are no gradients, nor a place for them (`stage3.py`, trainable_param_groups).
        self._trained = trained_partitions(job, self._limits.persistence_threshold)
        self._offloads = configuration.offload != "none"
        self._gradients = 0 if self._offloads else round_up(self._width * self._trained.local)
        self._weight = mean_width(job, recipe)
        persisted = self._weight * self._tensors.persisted
        self._resident = round_up(self._width * self._limits.reduce) + persisted + self._second_copy()

    def at(self, instant: Instant) -> Ledger:
        """Return unsharded weights, and beside the buffer the newest gradient and the one before it."""
        waiting = min(instant.unit_gradients, 2 * self._trained.largest)
        return Ledger(
            gradients=self._gradients + self._width * waiting,
            buffers=self._resident + self._weight * self._unsharded(instant),
        )

    def _second_copy(self) -> float:
        """Return hpZ's partitions of the weights, a hpz-th of each, from their forward to the end of the step.

        DeepSpeed 0.19, partition_parameters.py, `ds_secondary_tensor`, and stage3.py, `invalidate_secondary_tensor`.
        """
        hpz = self._job.configuration.hpz_partition_size
        return self._weight * (self._tensors.whole - self._tensors.persisted) / hpz if hpz > 1 else 0.0

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Return the last bucket's copy for the reduce-scatter, and the step."""
        resident = Ledger(gradients=self._gradients, buffers=self._resident)
        return (
            ("backward", resident + Ledger(temporaries=self._width * self._limits.reduce)),
            ("step", resident + Ledger(temporaries=self._step())),
        )

    def _unsharded(self, instant: Instant) -> float:
        """Elements of unsharded weights, those that always are left out."""
        if self._job.configuration.state_shards == 1:
            return 0.0  # a lone rank's partitions are the tensors themselves
        largest = self._tensors.largest
        to_come = self._tensors.whole - self._tensors.persisted - instant.done_gradients
        # The last all-gather is begun below the limit; a unit's weights go one by one as their gradients are made.
        return min(to_come - max(instant.unit_gradients - largest, 0.0), self._limits.max_live + largest)

    def _step(self) -> float:
        """Gradients made one flat tensor in the master weights' dtype and applied, a sub-group at a time."""
        if self._offloads:
            return offloaded_step(self._job, self._trained.local)
        size = min(self._trained.local, self._limits.sub_group)
        norm = NORM_BYTES * -(-self._trained.largest // self._job.configuration.state_shards)
        flat, master = round_up(self._width * size), round_up(self._recipe.master * size)
        cast = flat + master if self._recipe.master != self._width else flat
        return max(norm, cast, master + flat_step_temporaries(self._job, size, self._recipe.master))


def zero_buffers(job: Job, recipe: Recipe) -> FlatZeroBuffers | PartitionedZeroBuffers:
    """Return the buffers of a ZeRO stage.

    Its ledgers, one of them the step's, are all there is beside weights and optimizer states.
    """
    if job.configuration.zero_stage == 3:
        return PartitionedZeroBuffers(job, recipe)
    return FlatZeroBuffers(job, recipe)


class FlatZeroBuffers:
    """Stages 1 and 2, which cut the flattened parameters evenly over the ranks."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        configuration = job.configuration
        buckets = zero_buckets(configuration.zero_stage, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
        self._job, self._recipe, self._flat = job, recipe, flat_partition(job)
        self._width, self._bucket = recipe.gradient, min(buckets.reduce, self._flat.whole)
        self._buckets = (2 if buckets.overlap_comm else 1) * round_up(self._width * buckets.reduce)
        self._offloads = configuration.offload != "none"
        self._steps = configuration.gradient_accumulation_steps
        self._unreduced = configuration.zero_stage == 1 and self._steps > 1
        self._kept = 0 if self._offloads else round_up(self._width * self._flat.touched)
        # temp_grad_buffer_for_gpu_offload lives from step to step.
        self._resident = round_up(self._width * self._flat.largest) if self._offloads else 0

    def at(self, instant: Instant) -> Ledger:
        """Gradients, buckets and temporaries at an instant."""
        with_gradients = instant.done_gradients + instant.unit_gradients
        just_after_head = instant.enters and not instant.blocks_done
        last_unit = instant.done_gradients if just_after_head else instant.unit_gradients
        newest = self._width * min(last_unit, self._flat.largest)
        if self._unreduced:
            buffers = self._resident + self._buckets
            return Ledger(gradients=newest + self._width * self._accumulated(with_gradients), buffers=buffers)
        # Where there is a head its gradient comes before the buckets, beside the logits, which are gone after it.
        in_use = with_gradients > 0 and instant.unit != "head"
        flushed = with_gradients > self._bucket
        return Ledger(
            gradients=newest + self._earlier + (self._kept if flushed else 0),
            buffers=self._resident + (self._buckets if in_use else 0),
            temporaries=self._reduction(with_gradients) if flushed else 0,
        )

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Return the last bucket's reduction when backward has ended, and the step."""
        return ("backward", self._last_reduction()), *(("step", ledger) for ledger in self._step())

    @property
    def _earlier(self) -> int:
        """Reduced gradients of earlier micro-batches."""
        return self._kept if self._steps > 1 and not self._unreduced else 0

    def _accumulated(self, with_gradients: float) -> float:
        """Return elements of unreduced gradients.

        In the last micro-batch they go into the bucket one by one, in the first they come one by one, in one between
        them all are there.
        """
        whole = self._flat.whole
        return whole if self._steps > 2 else max(with_gradients, whole - with_gradients)

    def _reduction(self, with_gradients: float) -> float:
        """Return what reducing a bucket adds to it.

        It is the copy that ranks exchange, which a bucket that lies in one rank's part does without; under offload
        also, after it, the norm of one gradient at a time.
        """
        spans_ranks = self._flat.size < min(max(self._bucket, with_gradients), self._flat.whole)
        exchanged = self._width * self._bucket if spans_ranks else 0.0
        return max(exchanged, NORM_BYTES * self._flat.largest_piece if self._offloads else 0.0)

    def _last_reduction(self) -> Ledger:
        """Return the all-reduce, then the copy of its results, unless earlier buckets have made room for them."""
        before = self._kept if self._flat.whole > self._bucket else 0
        return Ledger(
            gradients=self._earlier + before,
            buffers=self._resident + self._buckets,
            temporaries=max(self._reduction(self._flat.whole), self._kept - before),
        )

    def _step(self) -> tuple[Ledger, ...]:
        """Gradients are measured, made one flat tensor in the master weights' dtype, freed, and applied."""
        if self._offloads:
            return (Ledger(buffers=self._resident, temporaries=offloaded_step(self._job, self._flat.size)),)
        part, master = (round_up(width * self._flat.size) for width in (self._width, self._recipe.master))
        norm = round_up(NORM_BYTES * self._flat.largest_piece)
        cast = part + master if self._recipe.master != self._width else part
        applied = flat_step_temporaries(self._job, self._flat.size, self._recipe.master)
        return (
            Ledger(gradients=self._kept, temporaries=max(norm, cast)),
            Ledger(gradients=master, temporaries=applied),
        )
