"""ParallelTrainer: a training loop over ranks that share a model, a batch or a pipeline, on bare arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dsplan.mpi.arrays import Tree
from dsplan.mpi.communicator import Communicator
from dsplan.mpi.sizes import ModelParallelConfig, ParallelGroups, UpdateRule
from dsplan.mpi.zero import ZeROOptimizer, ZeROStage
from strategies.errors import CannotRun

if TYPE_CHECKING:
    from mpi4py import MPI

    from dsplan.mpi.communicator import PerformanceMonitor


class Model(Protocol):
    """A model that is no torch module, as a trainer needs it."""

    @property
    def parameters(self) -> Tree:
        """Return this rank's parameters, a tree of arrays; steps write into them."""

    def gradients(self, batch: Any) -> tuple[float, Tree]:
        """Return the loss of a batch, and the gradients as a tree like the parameters."""


class ParallelTrainer:
    """Trains a model over the ranks of a communicator; every rank has one and calls it together.

        config = ModelParallelConfig(model_parallel_size=2, data_parallel_size=2)
        with ParallelTrainer(config, learning_rate=1e-3) as trainer:
            losses = trainer.train(model, batches, epochs=10)

    A model has `parameters` and `gradients(batch)` (see `Model`), or is a torch module that returns its loss. One that
    is divided over ranks divides itself, in `split(groups)`, which is called once before it trains: `TensorParallelism`
    over `groups.model` does it for linear layers.

    Args:
        config: how ranks are divided; None: all of them share the batch.
        comm: the ranks; None: all.
        stage: what ZeRO partitions over the ranks that share the batch.
        rule: how a step changes parameters; None: Adam with torch's defaults.
        seed: decides the order of batches, anew in every epoch.
        monitor: gets the time of every collective, and of `gradients`.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: the sizes do not fit the ranks; all ranks raise.
    """

    def __init__(
        self,
        config: ModelParallelConfig | None = None,
        comm: MPI.Comm | None = None,
        *,
        learning_rate: float = 1e-3,
        stage: ZeROStage | int = ZeROStage.STAGE_1,
        rule: UpdateRule | None = None,
        seed: int = 0,
        monitor: PerformanceMonitor | None = None,
    ) -> None:
        world = Communicator(comm, monitor)
        self.config = config or ModelParallelConfig(data_parallel_size=world.size)
        self.groups: ParallelGroups = self.config.split(world.comm)
        self.optimizer = ZeROOptimizer(self.groups.data, stage, learning_rate, rule=rule, monitor=monitor)
        self._world, self._data = world, Communicator(self.groups.data, monitor)
        self._seed, self._monitor = seed, monitor
        self._model: object = None
        self._epochs = 0

    def train(self, model: Any, dataset: Sequence[Any], epochs: int = 1) -> list[float]:
        """Train for `epochs` passes over a sequence of batches, and return the mean loss of each.

        Ranks that share the batch take every n-th of them, in one order; what does not divide is left out of that pass.
        A second call with the same model goes on.

        Raises:
            CannotRun: the model cannot be trained so, or there are fewer batches than ranks that share them.
        """
        ready = self._world.require_same(
            "train",
            lambda: self._checked(model, dataset, epochs),
            lambda _: [f"{len(dataset)} batches, {epochs} epochs"],
        )
        if model is not self._model:
            if hasattr(model, "split"):
                model.split(self.groups)
            self.optimizer.register_parameters(ready.parameters)
            self._model, self._epochs = model, 0
        return [self._epoch(ready, dataset) for _ in range(epochs)]

    def close(self) -> None:
        """Give the communicators back; all ranks call it together."""
        self.groups.free()

    def __enter__(self) -> ParallelTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure of one rank the others may never come to free theirs.
        if problem is None:
            self.close()

    def _checked(self, model: Any, dataset: Sequence[Any], epochs: int) -> Model:
        if epochs < 1:
            raise CannotRun(f"train: epochs is {epochs}; it must be at least 1")
        if len(dataset) < self._data.size:
            raise CannotRun(f"train: {len(dataset)} batches do not go round {self._data.size} ranks that share them")
        divided = self.config.model_parallel_size * self.config.pipeline_parallel_size
        if divided > 1 and not hasattr(model, "split"):
            raise CannotRun(
                f"train: {divided} ranks share a model, and {type(model).__name__} has no split(groups) that divides"
                " it; write one (TensorParallelism divides linear layers), or use data_parallel_size alone"
            )
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            return _TorchModel(model)
        if not callable(getattr(model, "gradients", None)) or callable(getattr(model, "parameters", len)):
            raise CannotRun(
                f"train: {type(model).__name__} has no parameters and gradients(batch); write them, or give a torch"
                " module that returns its loss"
            )
        return model  # type: ignore[no-any-return]

    def _epoch(self, model: Model, dataset: Sequence[Any]) -> float:
        order = np.random.default_rng(self._seed + self._epochs).permutation(len(dataset))
        self._epochs += 1
        usable = len(order) // self._data.size * self._data.size
        total = np.zeros(2)
        for number in order[self._data.rank : usable : self._data.size]:
            loss, gradients = self._gradients(model, dataset[int(number)])
            self.optimizer.step(model.parameters, self.optimizer.reduce_gradients(gradients), in_place=True)
            total += (loss, 1)
        self._data.all_reduce(total)
        return float(total[0] / total[1])

    def _gradients(self, model: Model, batch: Any) -> tuple[float, Tree]:
        if self._monitor is None:
            return model.gradients(batch)
        with self._monitor.timer("gradients"):
            return model.gradients(batch)


class _TorchModel:
    """A torch module that returns its loss, as a `Model`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def parameters(self) -> dict[str, Any]:
        return {name: value.data for name, value in self._module.named_parameters() if value.requires_grad}

    def gradients(self, batch: Any) -> tuple[float, dict[str, Any]]:
        self._module.zero_grad(set_to_none=True)
        if isinstance(batch, Mapping):
            output = self._module(**batch)
        else:
            output = self._module(*batch) if isinstance(batch, (tuple, list)) else self._module(batch)
        loss = getattr(output, "loss", output)
        loss.backward()
        trained = ((name, value) for name, value in self._module.named_parameters() if value.requires_grad)
        return float(loss.detach()), {name: value.grad for name, value in trained}
