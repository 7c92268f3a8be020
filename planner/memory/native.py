"""What our own ZeRO holds besides weights, optimizer states and activations, moment by moment.

Source: `strategies/zero/reduce.py`, `units.py` and `wire.py`; bucket sizes come from `planner.zero_buckets`.

* A gradient is let go of when the bucket that it travels in has been summed; two buckets are on the way while a third
  fills. Between ranks on CPUs every owner receives the others' runs of what is on the way; NCCL makes the sum alone.
* Stage 1 keeps whole gradients from the first micro-batch to the last, stages 2 and 3 this rank's part.
* Stage 3 has the root's weights whole from the start of forward to the end of backward, and those of two blocks.
* The step turns gradients into the masters' dtype bucket by bucket and applies them tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.job import Job
from planner.memory.instants import Instant
from planner.memory.ledger import Ledger
from planner.memory.optimizer_step import tensor_step_temporaries
from planner.memory.recipe import Recipe
from planner.memory.units import shards_of, units_of
from planner.zero_buckets import native_buckets

_ON_THE_WAY = 2


class NativeHolding:
    """Stages 1 to 3 of backend `native`."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        configuration, units = job.configuration, units_of(job)
        on_cpu = job.cluster.device.is_cpu
        buckets = native_buckets(configuration.zero_stage, hidden_size=job.facts.hidden_size, on_cpu=on_cpu)
        self._job, self._recipe = job, recipe
        self._ranks, self._whole = configuration.dp_shard, units.elements
        self._bucket = max(buckets.reduce, units.largest)
        self._received = 1 / self._ranks if not on_cpu else 1 - 1 / self._ranks
        self._several = configuration.gradient_accumulation_steps > 1
        once = configuration.zero_stage == 1 or not configuration.sync_each_micro_batch
        self._keeps_whole = self._several and once
        self._offloads = configuration.offload != "none"
        blocks = max((unit.elements for unit in units.blocks), default=0.0)
        is_sharded = configuration.zero_stage == 3 and self._ranks > 1
        self._gathered = recipe.gather * (units.root.elements + 2 * blocks) if is_sharded else 0.0

    def at(self, instant: Instant) -> Ledger:
        """Gradients on their way and summed ones, and gathered weights, at an instant."""
        made = instant.done_gradients + instant.unit_gradients
        moving = min(instant.unit_gradients, (_ON_THE_WAY + 1) * self._bucket)
        received = self._received * min(instant.unit_gradients, _ON_THE_WAY * self._bucket) if self._ranks > 1 else 0.0
        return Ledger(
            gradients=self._recipe.gather * moving + self._waiting(made),
            buffers=self._gathered + self._recipe.gather * received,
        )

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """The step, with gradients in the masters' dtype."""
        if self._offloads:
            return ()
        width = self._recipe.master or self._recipe.weight
        temporaries = tensor_step_temporaries(self._job, shards_of(self._job), width)
        return (("step", Ledger(gradients=width * self._whole / self._ranks, temporaries=temporaries)),)

    def _waiting(self, made: float) -> float:
        """Bytes of gradients that wait for the step."""
        width = self._recipe.gradient
        if self._keeps_whole:
            return width * max(self._whole - made, made / self._ranks)
        return width * (self._whole if self._several else made) / self._ranks
