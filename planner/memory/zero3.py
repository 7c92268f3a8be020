"""What DeepSpeed's ZeRO-3 holds besides partitions, optimizer states and activations, moment by moment.

Sources: DeepSpeed 0.19's `runtime/zero/stage3.py`, `partitioned_param_coordinator.py` and `partition_parameters.py`.

* Gradients are reduced into one buffer that lives from step to step, through a bucket that does as well. A tensor
  larger than the bucket waits as it is until the next gradient comes, is reduced in place, and let go of.
* Every module that begins, one without parameters too, has at least `prefetch` elements gathered ahead, so that the
  gathers run ahead of the work until `max_live` elements are there, or all that are still to be used in the step.
* Tensors below the persistence threshold are always there, whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.job import Job
from planner.memory.instants import Instant
from planner.memory.ledger import Ledger
from planner.memory.optimizer_step import flat_step_temporaries
from planner.memory.recipe import Recipe
from planner.memory.units import rounded
from planner.memory.zero_partition import tensor_partitions
from planner.zero_buckets import zero_buckets

NORM_BYTES = 8
"""DeepSpeed takes the gradient norm tensor by tensor in fp64 (`zero/utils.py`, get_norm_dtype)."""


def offloaded_step(job: Job, size: int) -> float:
    """Temporaries of a step in host memory, which on a CPU is the device's: torch's Adam runs there, and
    `DeepSpeedCPUAdam`, which needs none, elsewhere."""
    return flat_step_temporaries(job, size, 4) if job.cluster.device.is_cpu else 0.0


class PartitionedZeroHolding:
    """Stage 3, which cuts every tensor over the ranks."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        configuration = job.configuration
        self._job, self._recipe, self._width = job, recipe, recipe.gradient
        self._limits = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
        self._tensors = tensor_partitions(job, self._limits.persistence_threshold)
        self._offloads = configuration.offload != "none"
        self._gradients = 0 if self._offloads else rounded(self._width * self._tensors.local)
        persisted = recipe.weight * self._tensors.persisted
        self._resident = rounded(self._width * self._limits.reduce) + persisted

    def at(self, instant: Instant) -> Ledger:
        """Gathered weights, and beside the buffer the gradients that are not reduced yet: the newest and the one
        before it."""
        waiting = min(instant.unit_gradients, 2 * self._tensors.largest)
        return Ledger(
            gradients=self._gradients + self._width * waiting,
            buffers=self._resident + self._recipe.weight * self._gathered(instant),
        )

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """The last bucket's copy for the reduce-scatter, and the step."""
        resident = Ledger(gradients=self._gradients, buffers=self._resident)
        return (
            ("backward", resident + Ledger(temporaries=self._width * self._limits.reduce)),
            ("step", resident + Ledger(temporaries=self._step())),
        )

    def _gathered(self, instant: Instant) -> float:
        """Elements of gathered weights, those that always are left out."""
        if self._job.configuration.dp_shard == 1:
            return 0.0  # a lone rank's partitions are the tensors themselves
        largest = self._tensors.largest
        to_come = self._tensors.whole - self._tensors.persisted - instant.done_gradients
        # The last gather is begun below the limit; a unit's weights go one by one as their gradients are made.
        return min(to_come - max(instant.unit_gradients - largest, 0.0), self._limits.max_live + largest)

    def _step(self) -> float:
        """Gradients made one flat tensor in the master weights' dtype and applied, a sub-group at a time."""
        if self._offloads:
            return offloaded_step(self._job, self._tensors.local)
        size = min(self._tensors.local, self._limits.sub_group)
        norm = NORM_BYTES * -(-self._tensors.largest // self._job.configuration.dp_shard)
        flat, master = rounded(self._width * size), rounded(self._recipe.master * size)
        cast = flat + master if self._recipe.master != self._width else flat
        return max(norm, cast, master + flat_step_temporaries(self._job, size, self._recipe.master))
