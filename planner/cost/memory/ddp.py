"""Memory of whole replicas (`single`, `ddp`) besides states and activations: gradients and DDP's buckets.

Source: torch 2.13's `DistributedDataParallel` with its defaults and its reducer (`csrc/distributed/c10d/reducer.cpp`):
buckets of 1 MiB, then 25 MiB, that hold a copy of every gradient, made once and kept (`gradient_as_bucket_view` off).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.code_bases import code_base
from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.units import ALLOCATION_BYTES, trained_units_of
from planner.cost.precision import ERROR_BYTES, Recipe
from planner.types.job import Job

_BUCKET_BYTES = 25 << 20


class ReplicaBuffers:
    """Gradients, DDP's buckets and autocast's copies of weights, at every moment but the optimizer's step."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        units = trained_units_of(job)
        self._width, self._largest = recipe.gradient, units.largest
        self._adds = job.configuration.gradient_accumulation_steps > 1
        self._all = units.bytes(recipe.gradient)
        self.buckets = 0.0
        if job.configuration.strategy == "ddp":
            self.buckets = _buckets(recipe.gradient * units.elements)
            if job.configuration.gradient_compression == "int8":
                # What the sums and the means leave out: of the others' runs, and of this rank's.
                self.buckets += ERROR_BYTES * units.elements

    def at(self, instant: Instant) -> Ledger:
        """Return the ledger; a micro-batch after the first adds to gradients that are all there, tensor by tensor."""
        if self._adds:
            gradients = self._all + self._width * min(instant.unit_gradients, self._largest)
        else:
            gradients = self._width * (instant.done_gradients + instant.unit_gradients)
        return Ledger(gradients=gradients, buffers=self.buckets, temporaries=instant.cast)


class WholeGradientBuffers:
    """Gradients in one buffer that is made with the model and that every micro-batch adds to.

    Megatron's main gradients are such (`core/distributed/param_and_grad_buffer.py`). The optimizer steps on fp32
    gradients in place; of narrower ones it makes an fp32 copy of what is the rank's own (`core/optimizer/optimizer.py`,
    _copy_model_grads_to_main_grads). Where weight products add to the buffer themselves, only the token table's
    gradient is a tensor of its own (`core/tensor_parallel/layers.py`, gradient_accumulation_fusion).
    """

    def __init__(self, job: Job, recipe: Recipe) -> None:
        units = trained_units_of(job)
        self._made, self._largest = recipe.gather, units.largest
        self._fuses = code_base(job.workload.code).fuses_gradients
        self._all = recipe.gradient * units.elements
        own = units.elements / job.configuration.state_shards
        self._widened = recipe.master * own if recipe.gradient < recipe.master else 0.0

    def at(self, instant: Instant) -> Ledger:
        """Return the buffer, and the newest gradient until it is added."""
        is_apart = instant.unit == "table" or not self._fuses
        newest = self._made * min(instant.unit_gradients, self._largest) if is_apart else 0.0
        return Ledger(gradients=self._all + newest, temporaries=instant.cast)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Return the step's ledger."""
        return (("step", Ledger(gradients=self._all, temporaries=self._widened)),)


def _buckets(size: float) -> float:
    """Bytes. Where a bucket ends depends on the order of gradients, so that its rounding is taken at its mean."""
    return size + (1 + size // _BUCKET_BYTES) * ALLOCATION_BYTES / 2
