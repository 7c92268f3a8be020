"""Degrees of model, data and pipeline parallelism, checked against the number of ranks; optimizers of ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from dsplan.mpi.arrays import Array
from dsplan.mpi.communicator import Communicator
from strategies.errors import CannotRun

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place along each axis."""

    model: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class ModelParallelConfig:
    """Ranks along three axes; their product is the number of ranks.

        config = ModelParallelConfig(model_parallel_size=2, data_parallel_size=2)
        with config.split(MPI.COMM_WORLD) as groups:
            optimizer = ZeROOptimizer(dp_comm=groups.data, stage=ZeROStage.STAGE_2, learning_rate=1e-3)

    Ranks of one model lie side by side (they talk most), then those of one batch, then pipeline stages: Megatron-LM's
    order (arXiv:2104.04473), which keeps a model's ranks on one node where mpirun fills nodes one after the other.

    Raises:
        CannotRun: a size is no whole number above 0.
    """

    model_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CannotRun(f"{field.name} is {value!r}; it must be a whole number of at least 1")

    @property
    def world_size(self) -> int:
        """The number of ranks that this takes."""
        return self.model_parallel_size * self.data_parallel_size * self.pipeline_parallel_size

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank stands.

        Raises:
            CannotRun: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise CannotRun(f"rank {rank} is none of {self}; ranks are 0 to {self.world_size - 1}")
        rest, model = divmod(rank, self.model_parallel_size)
        pipeline, data = divmod(rest, self.data_parallel_size)
        return Coordinates(model=model, data=data, pipeline=pipeline)

    def require_world(self, ranks: int) -> None:
        """Check the sizes against the number of ranks.

        Raises:
            CannotRun: the sizes do not multiply to `ranks`; the message says what to change.
        """
        if ranks == self.world_size:
            return
        others = self.model_parallel_size * self.pipeline_parallel_size
        remedy = f"set data_parallel_size to {ranks // others}, or " if ranks % others == 0 else ""
        raise CannotRun(
            f"{self} = {self.world_size} ranks, and there {'is' if ranks == 1 else 'are'} {ranks}; {remedy}start"
            f" {self.world_size} ranks (mpirun -n {self.world_size})"
        )

    def split(self, comm: MPI.Comm | None = None) -> ParallelGroups:
        """Return the communicators of this rank along each axis; every rank of `comm` (None: all) calls it together.

        Raises:
            CannotRun: the sizes do not fit the ranks, or differ between ranks; all ranks raise.
        """
        communicator = Communicator(comm)

        def fitting() -> ModelParallelConfig:
            self.require_world(communicator.size)
            return self

        communicator.require_same("ModelParallelConfig", fitting, lambda config: [str(config)])
        here = self.coordinates(communicator.rank)
        # Ranks of one group share a colour and are ordered by the world's order.
        model = here.pipeline * self.data_parallel_size + here.data
        data = here.pipeline * self.model_parallel_size + here.model
        pipeline = here.data * self.model_parallel_size + here.model
        return ParallelGroups(
            coordinates=here,
            model=communicator.comm.Split(model, communicator.rank),
            data=communicator.comm.Split(data, communicator.rank),
            pipeline=communicator.comm.Split(pipeline, communicator.rank),
        )

    def __str__(self) -> str:
        return (
            f"model_parallel_size {self.model_parallel_size} x data_parallel_size {self.data_parallel_size}"
            f" x pipeline_parallel_size {self.pipeline_parallel_size}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """A rank's communicators; `free` them, or use a `with` block.

    `model` joins the ranks that hold the other parts of its layers, `data` those that hold the same parameters,
    `pipeline` the other stages, in order.
    """

    coordinates: Coordinates
    model: MPI.Comm
    data: MPI.Comm
    pipeline: MPI.Comm

    def free(self) -> None:
        """Give the communicators back to MPI; all ranks of each call it together."""
        for comm in (self.model, self.data, self.pipeline):
            comm.Free()

    def __enter__(self) -> ParallelGroups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure of one rank the others may never come to free theirs.
        if problem is None:
            self.free()


# Update rules work element by element, so that a rank can step any run of a parameter alone.


class UpdateRule(Protocol):
    """An elementwise optimizer. `states` are the names of its arrays per parameter, which begin as zeros."""

    @property
    def name(self) -> str:
        """The rule's name, as checkpoints keep it."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the rule's arrays for a parameter."""

    def update(
        self, value: Array, gradient: Array, states: Mapping[str, Array], step: int, learning_rate: float
    ) -> None:
        """Change `value` and `states` in place; all are flat, of one length; `step` counts from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay, as `torch.optim.AdamW` (arXiv:1711.05101); without decay it is Adam.

    Raises:
        CannotRun: a number is out of its range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "adamw"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise CannotRun(f"betas are {self.betas}; each is at least 0 and below 1")
        _require_at_least_zero("eps", self.eps)
        _require_at_least_zero("weight_decay", self.weight_decay)

    def update(
        self, value: Array, gradient: Array, states: Mapping[str, Array], step: int, learning_rate: float
    ) -> None:
        """As `UpdateRule.update`."""
        first, second = states["exp_avg"], states["exp_avg_sq"]
        beta1, beta2 = self.betas
        first += (1 - beta1) * (gradient - first)
        second *= beta2
        second += (1 - beta2) * np.square(gradient)
        spread = np.sqrt(second)
        spread /= math.sqrt(1 - beta2**step)
        spread += self.eps
        value *= 1 - learning_rate * self.weight_decay
        value -= learning_rate / (1 - beta1**step) * first / spread


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """Gradient descent as `torch.optim.SGD`: heavy-ball momentum, weight decay added to the gradient.

    Raises:
        CannotRun: a number is out of its range.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        _require_at_least_zero("momentum", self.momentum)
        _require_at_least_zero("weight_decay", self.weight_decay)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the rule's arrays for a parameter."""
        return ("momentum",) if self.momentum else ()

    def update(
        self, value: Array, gradient: Array, states: Mapping[str, Array], step: int, learning_rate: float
    ) -> None:
        """As `UpdateRule.update`."""
        direction = gradient + self.weight_decay * value if self.weight_decay else gradient
        if self.momentum:
            momentum = states["momentum"]
            momentum *= self.momentum
            momentum += direction
            direction = momentum
        value -= learning_rate * direction


def _require_at_least_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise CannotRun(f"{name} is {value}; it must be a number of at least 0")
