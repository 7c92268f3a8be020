"""A training loop around an engine, for scripts that bring a model, data and a config and no loop of their own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from strategies.config.read import read_config
from strategies.engine.base import Engine
from strategies.engine.checkpoint_manager import CheckpointManager, require_parts
from strategies.engine.initialize import initialize
from strategies.engine.pipeline_step import Loss, call_for_loss, train_batch
from strategies.errors import CannotRun
from strategies.torch_compat.tensors import tree_to
from strategies.variables import RUN_DIRECTORY

if TYPE_CHECKING:
    from strategies.telemetry.training_monitor import TrainingMonitor

_POSITION = "trainer"
"""The key of `client_state` for the position in a script's own loader."""
SAVE_EVERY_STEPS = 500
"""Optimizer steps between the checkpoints of `enable_fault_tolerance` where neither it nor the config says."""
_START = "start"
"""The folder below a checkpoint directory that holds the state before the first step."""


class DistributedTrainer:
    """Trains an engine over data for some epochs; every rank has one and calls it together.

    A batch is moved to the engine's device and handed to the model: a dictionary by name, a tuple or list by position,
    anything else as it is. The model returns the loss, or something with it (`.loss`, `["loss"]`).

    Args:
        engine: what `dsplan.initialize` returned.
        optimizer: the engine's own, or None.
        monitor: follows the engine's steps.
        config: says where checkpoints lie (`save_dir`), where the engine's own config does not.
        loss: `loss(engine, batch)` gives the loss instead, of a batch on the device.

    Raises:
        CannotRun: the optimizer is another, or the config cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: object = None,
        monitor: TrainingMonitor | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        loss: Loss | None = None,
    ) -> None:
        require_parts(engine, optimizer, None, asker="DistributedTrainer")
        self.engine = engine
        self._loss_of_script = loss
        self._loss = loss or call_for_loss
        directory = Path(read_config(config).checkpoint.directory or engine.checkpointing.directory or "checkpoints")
        self._checkpoints = CheckpointManager(engine, directory)
        self._resumes = self._keeps_start = False
        self._attempts = 0
        if monitor is not None:
            monitor.watch(engine)

    def enable_fault_tolerance(
        self, auto_resume: bool = True, max_retry_attempts: int = 0, checkpoint_interval: int | None = None
    ) -> None:
        """Save while training, and resume from what was saved.

        Args:
            auto_resume: `train` begins with the newest checkpoint, where the engine has not trained yet.
            max_retry_attempts: how often `train` resumes from the newest checkpoint after a failure. A process alone
                can do that; of several ranks the others wait for one that failed, so that all are started again, by
                `dsplan run --retries`.
            checkpoint_interval: optimizer steps between checkpoints; None: what the config says, else 500.

        Raises:
            CannotRun: a number is impossible, or the config has another interval.
        """
        of_config = self.engine.checkpointing.every_steps
        if max_retry_attempts < 0:
            raise CannotRun(f"max_retry_attempts is {max_retry_attempts}; it must be at least 0")
        if of_config is not None and checkpoint_interval not in (None, of_config):
            raise CannotRun(
                f"checkpoint_interval is {checkpoint_interval} and the config saves every {of_config} steps; leave one"
                " out"
            )
        self._resumes, self._keeps_start, self._attempts = auto_resume, True, max_retry_attempts
        if of_config is None:
            every = SAVE_EVERY_STEPS if checkpoint_interval is None else checkpoint_interval
            self._checkpoints = CheckpointManager(self.engine, self._checkpoints.directory, every_steps=every)
        is_supervised = RUN_DIRECTORY in os.environ  # the command starts ranks again, under a better plan if need be
        if max_retry_attempts and (is_supervised or not self._is_alone):
            self._attempts = 0
            if self.engine.is_main and not is_supervised:
                notice(
                    f"max_retry_attempts={max_retry_attempts}: a rank cannot try again while others wait for it; start"
                    f" the script with `dsplan run --retries {max_retry_attempts}`"
                )

    def has_checkpoint(self) -> bool:
        """Return whether there is one to resume from."""
        return self._checkpoints.latest is not None

    def restore_from_checkpoint(self) -> Path:
        """Go back to the newest checkpoint and return its path.

        Raises:
            CannotRun: there is none.
            BrokenFile: it cannot be loaded.
        """
        return self._restore(self._checkpoints.directory)

    def reset(self) -> None:
        """Go back to the weights, optimizer and place in the data from before the first step.

        Raises:
            CannotRun: they were not kept; `enable_fault_tolerance` has `train` keep them.
        """
        if not (self._checkpoints.directory / _START).exists():
            raise CannotRun(
                "reset: the state before the first step was not kept; call enable_fault_tolerance before train"
            )
        self._restore(self._checkpoints.directory / _START)

    def train(self, epochs: int, loader: Iterable[Any] | None = None) -> list[float]:
        """Train until `epochs` epochs are complete; return the mean loss over all ranks of each that ended here.

        Args:
            epochs: in all, those before a resume included.
            loader: gives this rank's micro-batches, and has a length; None: that of the engine's `training_data`.

        Raises:
            CannotRun: there is no data, or the model returns no loss.
        """
        if epochs < 1:
            raise CannotRun(f"train: epochs is {epochs}; it must be at least 1")
        if loader is None:
            loader = self.engine.dataloader
        if loader is None:
            raise CannotRun(
                "train: there is no data; give setup_distributed_training(..., training_data=dataset) or train(epochs,"
                " loader)"
            )
        supervision = self.engine.supervision
        is_resumed = supervision is not None and supervision.is_resumed
        if is_resumed or (self._resumes and not self.engine.global_steps and self.has_checkpoint()):
            self.restore_from_checkpoint()
        if self._keeps_start and not self.engine.global_steps:
            self.engine.save_checkpoint(self._checkpoints.directory / _START, asynchronous=False, keep_last=1)
        losses: list[float] = []
        while True:
            try:
                self._train(epochs, loader, losses)
                self.engine.wait_for_checkpoint()
                return losses
            except DsplanError:
                raise
            except Exception as problem:
                if not self._attempts:
                    raise
                self._attempts -= 1
                self._recover(problem)

    @property
    def _is_alone(self) -> bool:
        return self.engine.environment.world_size == 1

    def _recover(self, problem: Exception) -> None:
        """Go back to what was saved last."""
        if self.has_checkpoint():
            self.restore_from_checkpoint()
        else:
            self.reset()
        reason = (str(problem).strip().splitlines() or [""])[0]
        notice(f"{type(problem).__name__}: {reason}; training goes on from step {self.engine.global_steps}")

    def _restore(self, directory: Path) -> Path:
        self.engine.module.zero_grad(set_to_none=True)  # of a step that was not finished
        path, state = self.engine.load_checkpoint(directory)
        if path is None:
            raise CannotRun(f"{directory} has no checkpoint to go on from; call reset, or train from the beginning")
        self.engine.client_state = state
        return path

    def _train(self, epochs: int, loader: Iterable[Any], losses: list[float]) -> None:
        self.engine.train()
        own = self.engine.dataloader
        if own is not None and loader is own:
            while own.epoch < epochs:
                self._epoch(own, losses)
            return
        start = self.engine.client_state.get(_POSITION, {"epoch": 0, "batches": 0})
        for epoch in range(start["epoch"], epochs):
            sampler = getattr(loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # type: ignore[union-attr]
            self._epoch(loader, losses, epoch, start["batches"] if epoch == start["epoch"] else 0)

    def _epoch(self, loader: Iterable[Any], losses: list[float], epoch: int | None = None, trained: int = 0) -> None:
        """Pass over the data once, without the first `trained` batches; `epoch` where the loader keeps no position."""
        train = self._steps_of_pipeline if self.engine.mesh.size("pp") > 1 else self._micro_batches
        mean = train(loader, epoch, trained)
        if mean is not None:
            losses.append(mean)
        if epoch is not None:
            self.engine.client_state[_POSITION] = {"epoch": epoch + 1, "batches": 0}

    def _micro_batches(self, loader: Iterable[Any], epoch: int | None, trained: int) -> float | None:
        """Train on one batch after the other; return the mean loss over all ranks, or None if there was no batch."""
        engine, batches = self.engine, 0
        total = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for number, batch in enumerate(loader, start=1):
            if number <= trained:
                continue
            loss = self._loss(engine, tree_to(engine.device, batch))
            total[0] += loss.detach()
            batches += 1
            engine.backward(loss)
            if epoch is not None and engine.is_gradient_accumulation_boundary():
                # Before the step, which may save.
                engine.client_state[_POSITION] = {"epoch": epoch, "batches": number}
            engine.step()
            self._checkpoints.step()
        total[1] = batches
        if not self._is_alone:
            dist.all_reduce(total)
        return (total[0] / total[1]).item() if total[1] else None

    def _steps_of_pipeline(self, loader: Iterable[Any], epoch: int | None, trained: int) -> float | None:
        """Train where a pipeline takes all micro-batches of a step at once; those of no whole step are left out."""
        engine, losses = self.engine, list[torch.Tensor]()
        steps = engine.configuration.gradient_accumulation_steps
        batches = itertools.islice(loader, trained, None)
        number = trained
        while len(step := list(itertools.islice(batches, steps))) == steps:
            number += steps
            if epoch is not None:
                engine.client_state[_POSITION] = {"epoch": epoch, "batches": number}
            losses.append(train_batch(engine, iter(step), self._loss_of_script))
            self._checkpoints.step()
        return torch.stack(losses).double().mean().item() if losses else None


def setup_distributed_training(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    training_data: Dataset[Any] | None = None,
    loss: Loss | None = None,
    monitor: TrainingMonitor | None = None,
    **options: Any,
) -> DistributedTrainer:
    """Call `dsplan.initialize` and return a `DistributedTrainer` of its engine.

        training = dsplan.setup_distributed_training(model, {"batch_size": 8, "zero_stage": 2}, training_data=dataset)
        training.train(epochs=10)

    Args:
        config: as `initialize` takes it; flat keys (`batch_size`, `learning_rate`, `zero_stage`, `save_dir`, ...) too.
        model: as `initialize` takes it.
        training_data: as `initialize` takes it.
        loss: as `DistributedTrainer` takes it.
        monitor: follows the engine's steps.
        options: further arguments of `initialize`.
    """
    engine, *_ = initialize(model, config=config, training_data=training_data, **options)
    return DistributedTrainer(engine, monitor=monitor, config=config, loss=loss)
