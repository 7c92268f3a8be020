"""Our own ZeRO besides weights, optimizer states and activations, moment by moment.

Source: `strategies/backends/zero/gradient_reducer.py`, `units.py` and `collectives.py`; bucket sizes come from
`planner.cost.zero_buckets`.

* A gradient is freed when the bucket that it travels in has been summed; two buckets are on the way while a third
  fills. Between ranks on CPUs every owner receives the others' runs of what is on the way; NCCL makes the sum alone.
* Stage 1 keeps whole gradients from the first micro-batch to the last, stages 2 and 3 this rank's part. In the last
  they go as they are reduced; in one between the first and the last all of them are there to the end.
* Stage 3 has the root's weights whole from the start of forward to the end of backward, and those of two blocks.
* The step turns gradients into the masters' dtype a sixteenth at a time and applies them tensor by tensor.
* In 8 bits the buckets on the way are this rank's run in fp32 and what goes to and comes from the others; every rank
  remembers the rounding of what it sent.
* Where states are offloaded, a gradient has left a GPU soon after it was summed, and the step runs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.states import tensor_step_temporaries
from planner.cost.memory.units import trained_shards_of, trained_units_of, units_of
from planner.cost.memory.zero.offload import offload_split, weights_are_whole, window_bytes
from planner.cost.memory.zero.partition import steps_whole_tensors
from planner.cost.precision import ERROR_BYTES, INT8_BYTES, Recipe
from planner.cost.zero_buckets import NATIVE_STEP_RUNS, native_buckets
from planner.types.job import Job

_ON_THE_WAY = 2
_GOING_DOWN = 4
"""Buckets whose sums may be on their way to the host at once (`strategies/backends/zero/offload.py`)."""
_WIDE = 4
"""Bytes of a gradient while it is made into 8 bits and added up."""
_FUSED_ON_HOST = ("adamw", "adamw-fused")
"""Optimizers that torch's fused kernels step on the host, in place."""


class NativeZeroBuffers:
    """Stages 1 to 3 of backend `native`."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        configuration, units, trained = job.configuration, units_of(job), trained_units_of(job)
        on_cpu = job.cluster.device.is_cpu
        buckets = native_buckets(configuration.zero_stage, hidden_size=job.facts.hidden_size, on_cpu=on_cpu)
        self._job, self._recipe = job, recipe
        self._split = split = offload_split(job)
        self._ranks, self._whole = configuration.state_shards, trained.elements
        self._bucket = max(buckets.reduce, trained.largest)
        self._in_buckets = (_ON_THE_WAY + 1) * buckets.reduce
        self._received = 1 / self._ranks if not on_cpu else 1 - 1 / self._ranks
        self._in_8_bits = configuration.gradient_compression == "int8" and self._ranks > 1
        others = 1 - 1 / self._ranks
        self._errors = ERROR_BYTES * others * self._whole if self._in_8_bits else 0.0
        self._exchanged = 2 * INT8_BYTES * others
        self._micro_batches, self._largest = configuration.gradient_accumulation_steps, trained.largest
        self._several = self._micro_batches > 1
        once = configuration.zero_stage == 1 or not configuration.sync_each_micro_batch
        self._keeps_whole = self._several and once
        # On a CPU the gradients of states that are on disk stay in memory, which is where they go from a GPU.
        self._staying = 1.0 if on_cpu else split.on_device / split.local
        self._going = 0.0 if on_cpu else recipe.gather * min(sum(split.on_host), _GOING_DOWN * split.largest)
        blocks = max((unit.elements for unit in units.blocks), default=0.0)
        is_sharded = not weights_are_whole(job)
        # Stage 3 has buckets of every unit's own: the root's is begun by the head and full when the table's is there.
        by_unit = configuration.zero_stage == 3 and is_sharded
        self._shared = min(float(buckets.reduce), blocks) if by_unit else float(buckets.reduce)
        self._root = min(float(buckets.reduce), units.root.elements) if by_unit else 0.0
        self._block = recipe.gather * blocks if is_sharded else 0.0
        self._unsharded = recipe.gather * units.root.elements if is_sharded else 0.0
        self._largest_bucket = max(self._shared, self._root, trained.largest) if by_unit else self._bucket
        self._steps_together = configuration.optimizer == "adamw" and not on_cpu

    def at(self, instant: Instant) -> Ledger:
        """Gradients on their way and summed ones, and unsharded weights, at an instant."""
        with_gradients = instant.done_gradients + instant.unit_gradients
        going = min(self._going, self._recipe.gather * with_gradients / self._ranks)
        blocks = 1 if instant.unit == "head" else 2  # the last one beside it, and otherwise one ahead
        always = Ledger(buffers=self._unsharded + blocks * self._block + self._errors)
        last = Ledger(gradients=going + self._waiting(with_gradients)) + self._moving(instant, with_gradients)
        if not self._keeps_whole:
            return always + last
        return always + max(
            last, self._unreduced(with_gradients, instant.unit_gradients), key=lambda ledger: ledger.total
        )

    def _unreduced(self, with_gradients: float, newest: float) -> Ledger:
        """Return the ledger of a micro-batch whose gradients wait.

        The ones before left theirs, all of it from the second micro-batch on, and there is the gradient that is about
        to be added to it.
        """
        before = self._whole if self._micro_batches > 2 else min(with_gradients, self._whole)
        added = self._micro_batches > 2 or self._recipe.gather != self._recipe.gradient
        transient = self._recipe.gather * min(newest, self._largest) if added else 0.0
        return Ledger(gradients=self._recipe.gradient * before + transient)

    def _moving(self, instant: Instant, with_gradients: float) -> Ledger:
        """Buckets that fill, and that are on their way.

        A shared one is made whole for its first gradient, which is copied into it; small units share buckets with those
        before, a tensor of half a bucket or more travels as it is.
        """
        width, largest = self._recipe.gather, min(instant.unit_gradients, self._largest)
        moving, newest = max(instant.unit_gradients, min(with_gradients, self._in_buckets)), 0.0
        on_the_way = min(moving, _ON_THE_WAY * self._bucket)
        if 2 * self._largest < self._shared and with_gradients:
            full = with_gradients // self._shared * self._shared if with_gradients < self._whole else self._whole
            begun = min(self._whole, full + self._shared) + (0.0 if full >= self._root else self._root)
            on_the_way = min(full, _ON_THE_WAY * self._shared)
            moving, newest = min(begun, self._whole, max(on_the_way + self._shared, self._root)), largest
        filling = max(moving - on_the_way, 0.0)
        with_gradients = moving
        if self._in_8_bits:
            own = _WIDE / self._ranks
            return Ledger(
                gradients=width * filling + own * on_the_way,
                buffers=self._exchanged * on_the_way,
                temporaries=2 * own * min(with_gradients, self._bucket),
            )
        received = self._received * on_the_way if self._ranks > 1 else 0.0
        return Ledger(gradients=width * (filling + on_the_way + newest), buffers=width * received)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Return the step, with gradients in the masters' dtype; the host's is the device's where that is a CPU."""
        split, width = self._split, self._recipe.master or self._recipe.weight
        is_whole = steps_whole_tensors(self._job.configuration)
        stepped = trained_units_of(self._job) if is_whole else trained_shards_of(self._job)
        temporaries = tensor_step_temporaries(self._job, stepped, width)
        moments = [Ledger()]
        if split.on_device > 0:
            share = split.on_device / split.local
            widens = width != self._recipe.gradient
            run = max(split.on_device / NATIVE_STEP_RUNS, min(self._largest_bucket / self._ranks, split.on_device))
            # Whole tensors are stepped at once, when each has freed its narrow gradient.
            widened = (width - self._recipe.gradient) * split.on_device if is_whole else width * run
            gradients = self._recipe.gradient * split.on_device + (widened if widens else 0.0)
            if widens and not is_whole:
                # A run is stepped by itself, when its narrow gradients are gone: what is made of all tensors at once is
                # made of the run's.
                moments.append(Ledger(gradients=gradients))
                gradients -= self._recipe.gradient * run
                share *= run / split.on_device if self._steps_together else 1.0
            moments.append(Ledger(gradients=gradients, temporaries=temporaries * share))
        if split.on_host and self._staying == 1.0:
            fused = self._job.configuration.optimizer in _FUSED_ON_HOST
            gradients = self._recipe.gradient * sum(split.on_host)
            widened = width * split.largest if width != self._recipe.gradient else 0.0
            states = window_bytes(self._job, self._recipe)
            working = widened + (0.0 if fused else temporaries)
            moments.append(Ledger(gradients=gradients, buffers=states, temporaries=working))
        return [("step", ledger + Ledger(buffers=self._errors)) for ledger in moments]

    def _waiting(self, with_gradients: float) -> float:
        """Bytes of gradients that wait for the step."""
        width = self._recipe.gradient
        if self._keeps_whole:
            return width * max(self._whole - with_gradients, self._staying * with_gradients / self._ranks)
        return self._staying * width * (self._whole if self._several else with_gradients) / self._ranks
