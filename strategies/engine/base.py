"""The engine of a training script, and the strategy that builds it for one way to distribute a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from planner.types.plan import Configuration, Plan
from planner.vocabulary import FSDP_STRATEGIES
from strategies.checkpoint.checkpoints import Checkpoints, custom_of
from strategies.checkpoint.object_store import location
from strategies.checkpoint.saving import SaveOptions
from strategies.checkpoint.states import States, unwrapped
from strategies.checkpoint.streaming import Weights
from strategies.config.values import CheckpointSection
from strategies.distributed.environment import Environment
from strategies.engine.telemetry import Telemetry
from strategies.errors import CannotRun
from strategies.modules.precision import LossScale
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import CALL_TRAIN_BATCH
from strategies.parallel.split import parts_of
from strategies.parallel.whole import whole_layers, whole_tensors
from strategies.protocols import Observer, Scheduler, TrainingParts
from strategies.run_directory.heartbeat import PULSE, beat
from strategies.telemetry.tensorboard_log import EVERY_STEPS
from strategies.torch_compat.tensors import tree_leaves, tree_to

if TYPE_CHECKING:
    from strategies.data.loader import ShardedLoader
    from strategies.supervision.supervision import Supervision
    from strategies.telemetry.memory_report import MemoryReport


class Strategy(ABC):
    """One way of spreading a model over ranks; makes the engine that trains it."""

    def __init__(self, configuration: Configuration, environment: Environment) -> None:
        self.configuration = configuration
        self.environment = environment
        self.mesh = Mesh.of(configuration, environment)

    @abstractmethod
    def engine(self, parts: TrainingParts) -> Engine:
        """Place the model and its optimizer and return the engine that trains them."""


class Engine(ABC):
    """A model in training: call it, `backward` the loss, `step`. The same calls under every strategy.

    `step` is called after every `backward`; it changes the weights once per `gradient_accumulation_steps` calls.
    `module` is the script's own model, `wrapped` what runs it. `telemetry` reports; without observers nothing is
    measured. `gradient_clipping` is the norm that the next step clips to, 0 for none; it can be set. `client_state`,
    JSON, is what the script wants to find again after a restart: checkpoints that `dsplan run` has the engine save by
    itself hold it. Where `client_state_source` is set, it makes the state when such a checkpoint is saved.
    """

    module: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Scheduler | None
    gradient_clipping: float
    checkpointing: CheckpointSection = CheckpointSection()

    def __init__(self, plan: Plan, strategy: Strategy) -> None:
        self.plan = plan
        self.environment = strategy.environment
        self.mesh = strategy.mesh
        self.dataloader: ShardedLoader | None = None
        self.telemetry = Telemetry(self)
        self.client_state: dict[str, Any] = {}
        self.client_state_source: Callable[[], dict[str, Any]] | None = None
        self.supervision: Supervision | None = None
        self._may_reduce = True
        self._boundary: bool | None = None
        self._is_uneven = plan.configuration.is_uneven

    @property
    def configuration(self) -> Configuration:
        """The plan's."""
        return self.plan.configuration

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.environment.device

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes for all."""
        return self.environment.is_main

    @property
    def data_parallel_rank(self) -> int:
        """The part of a global batch that this rank reads; ranks that share a sample (tp, pp, cp) read the same."""
        return self.mesh.rank("dp")

    @property
    def data_parallel_size(self) -> int:
        """The number of parts that a global batch is cut into."""
        return self.mesh.size("dp")

    @property
    def micro_batch_size(self) -> int:
        """Samples of this rank's micro-batches: the plan's, or this rank's share where ranks have unlike ones."""
        return self.configuration.micro_batch_of(self.data_parallel_rank)

    @cached_property
    def sample_weight(self) -> float:
        """The weight of a micro-batch's mean loss on this rank beside that of the typical rank, 1 where all are alike.

        A mean over ranks is one over samples where each counts by the samples that it has.
        """
        return self.micro_batch_size * self.data_parallel_size / self.configuration.samples_together

    @property
    def gathers_weights(self) -> bool:
        """True if every forward pass all-gathers weights, so that no rank may do one alone."""
        return self.configuration.strategy in (*FSDP_STRATEGIES, "zero3") and self.environment.world_size > 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass under the plan's precision, on a GPU with what is in host memory moved there.

        Raises:
            CannotRun: the module is cut into pipeline stages, or ranks have micro-batches of unlike sizes and this is
                none of this rank's.
        """
        self._require_whole()
        if self._is_uneven and self.module.training:
            self._require_own_share((args, kwargs))
        if self.device.type != "cpu":  # DDP and FSDP would do so themselves
            args, kwargs = tree_to(self.device, (args, kwargs))
        if not self.observers or not self.module.training:
            beat()
            return self._forward(*args, **kwargs)
        self.telemetry.forward_starts(self.module, (args, kwargs))
        with self.profile("forward"):
            return self._forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients; the loss is divided by the accumulation steps here, not by the caller.

        Raises:
            CannotRun: the module is cut into pipeline stages.
        """
        self._require_whole()
        if not self.observers:
            with self.meeting("backward"):
                return self._backward(loss)
        self.telemetry.loss_is(loss)
        with self.profile("backward"), self.meeting("backward"):
            return self._backward(loss)

    def train_batch(self, batch: Any) -> torch.Tensor:
        """Make a whole optimizer step: its micro-batches forward and backward, and `step`; called on every rank.

        Under a pipeline the only way to train, under every other strategy the same as the loop of calls.

        Args:
            batch: this data-parallel rank's samples of the step (`micro_batch_size` for each accumulation step):
                tensors with a row for each, in a mapping (given to the model by name) or a tuple (by position), which
                are cut into micro-batches; or an iterator of micro-batches, of which `gradient_accumulation_steps` are
                taken.

        Returns:
            The mean loss over the global batch, a scalar in fp32 on the device; the same on every rank.

        Raises:
            CannotRun: the batch has other samples than a step of the plan, or the model returns no loss.
            StopIteration: the iterator is at its end.
        """
        from strategies.engine.pipeline_step import train_batch

        return train_batch(self, batch)

    def eval_batch(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch over all data-parallel ranks, in evaluation mode and without gradients.

        Called on every rank, with any number of samples, in the forms of `train_batch` (an iterator gives one
        micro-batch).
        """
        from strategies.engine.pipeline_step import eval_batch

        return eval_batch(self, batch)

    def step(self) -> None:
        """At the accumulation boundary: clip, change the weights, clear gradients, step the scheduler. Else nothing.

        Gradients that are not finite on some rank change nothing on any: the step is skipped and counted.
        """
        acts = self.is_gradient_accumulation_boundary()
        profiled = self.profile("step") if self.observers and acts else nullcontext()
        with profiled, self.meeting("step") if acts else nullcontext():
            self._step()
        if not acts:
            return
        if self.dataloader is not None:
            self.dataloader.trained()
        self.telemetry.step_ended()

    @property
    def observers(self) -> list[Observer]:
        """The engine's `telemetry.observers`, which are called with what happens."""
        return self.telemetry.observers

    @property
    def counted_peak_bytes(self) -> int | None:
        """The most bytes that `memory_timeline` or `MemoryProfiler` has seen alive."""
        return self.telemetry.counted_peak_bytes

    @counted_peak_bytes.setter
    def counted_peak_bytes(self, value: int | None) -> None:
        self.telemetry.counted_peak_bytes = value

    def profile(self, name: str) -> AbstractContextManager[None]:
        """Name a section of the script, in traces and, where timers run, in the times that are printed."""
        return self.telemetry.profile(name)

    def memory_report(self) -> MemoryReport:
        """Return what this rank's tensors take now and took at most, beside the plan's prediction; printed, a table."""
        return self.telemetry.memory_report()

    def memory_profile(self) -> MemoryReport:
        """Return the `memory_report` of this rank, which rank 0 prints."""
        return self.telemetry.memory_profile()

    def memory_timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Draw this rank's memory over the steps that are made inside, as an SVG picture; they take longer."""
        return self.telemetry.memory_timeline(path)

    def set_tensorboard_writer(self, writer: Any, *, every: int = EVERY_STEPS) -> None:
        """Write loss, rates, norms, memory and seconds of sections to rank 0's writer, which the script closes.

        Raises:
            CannotRun: it is no such writer, or `every` steps are below 1.
        """
        self.telemetry.set_tensorboard_writer(writer, every=every)

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self.wrapped.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode."""
        return self.train(False)

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside may keep their gradients on this rank, whole, until one outside sums them."""
        before, self._may_reduce = self._may_reduce, False
        try:
            yield
        finally:
            self._may_reduce = before

    def close(self) -> None:
        """Let the observers finish their files; leaving Python does it too."""
        self.telemetry.close()

    @property
    @abstractmethod
    def global_steps(self) -> int:
        """Optimizer steps so far, over all runs that this one resumed."""

    @property
    @abstractmethod
    def gradient_norm(self) -> float | None:
        """The norm of the last step's gradients over all ranks before clipping, or None if it was not finite."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """Steps that were not taken because gradients were not finite, over all runs that this one resumed."""

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """The factor of the loss before backward, 1 but for fp16."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` changes the weights."""
        return self._is_boundary_by_count() if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide from the next forward pass on whether `step` changes the weights, in loops that see by themselves.

        None: every `gradient_accumulation_steps` calls do again. Each loss is divided by that number as ever.
        """
        self._boundary = is_boundary

    @abstractmethod
    def state_tensors(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Return the `parameters`, `gradients` and `optimizer` states (masters too) that lie in this rank's memory."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copy the whole model's weights and buffers on the host, by its own names; called on every rank.

        Every rank gets all of them, also those of other pipeline stages and experts and the parts of other tp ranks.
        """
        names = self.module.state_dict().keys()  # FSDP2 would shard again what is whole
        with self.whole_parameters():
            tensors: dict[str, torch.Tensor] = dict(self.module.named_buffers(remove_duplicate=False))
            tensors |= self.module.named_parameters(remove_duplicate=False)
            own = {name: tensors[name] for name in names if name in tensors}
            if not self.mesh.is_data_parallel:
                return whole_tensors({unwrapped(name): own[name] for name in own}, parts_of(self.module), self.mesh)
            return {name: tensor.detach().cpu().clone() for name, tensor in own.items()}

    @contextmanager
    def whole_parameters(self, *, keeps_changes: bool = False) -> Iterator[None]:
        """Make `module.parameters()` whole on every rank inside, to read, to generate with, or to change.

        They are in the dtype that they compute in. Every rank must enter and leave together; inside, one may run the
        model alone, but for DeepSpeed's stage 3. Changes may be lost unless `keeps_changes`, which takes over rank 0's.

        Under tp too; of a pipeline a rank has the weights of its own stages, and of experts that ep ranks split its
        own: `state_dict` has the whole model. Changes are then those of the first of the ranks that have the same
        weights.
        """
        with ExitStack() as opened:
            with PULSE.meeting("whole_parameters"):
                opened.enter_context(self._whole_parameters(keeps_changes=keeps_changes))
                if self.mesh.size("tp") > 1:
                    opened.enter_context(whole_layers(self.module, self.mesh, keeps_changes=keeps_changes))
            with PULSE.apart():
                yield

    def save_checkpoint(
        self,
        directory: str | Path,
        client_state: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool | None = None,
        keep_last: int | None = None,
        save: Callable[[Engine, Path], object] | None = None,
        trainable_only: bool | None = None,
    ) -> Path:
        """Write model, optimizer, scheduler, counters, random states, the place in the data and `client_state`.

        Called on every rank; returns the path below `directory`. The checkpoint appears whole or not at all, and
        `latest` names it only then.

        Args:
            directory: checkpoints are folders in it.
            client_state: JSON (numbers, texts, lists, dicts); None: `engine.client_state`.
            asynchronous: return when all is copied to host memory and write meanwhile; None: what the config says.
                The next call waits for it, and raises what went wrong with it.
            keep_last: how many of the newest checkpoints stay; None: what the config says, else all.
            save: called on every rank with the engine and a folder, writes the tensors its own way instead, at once.
            trainable_only: leave out frozen weights, which `load_checkpoint` then takes to be the model's own; None:
                what the config says, else False.

        Raises:
            BrokenFile: it cannot be written; the checkpoints that are there are as they were.
            CannotRun: something in it cannot be saved.
        """
        self._settle()
        config = self.checkpointing
        options = SaveOptions(
            keep_last=config.keep_last if keep_last is None else keep_last,
            asynchronous=config.asynchronous if asynchronous is None else asynchronous,
            custom=custom_of(save, self),
            trainable_only=config.trainable_only if trainable_only is None else trainable_only,
            completed=None if self.supervision is None else self.supervision.script_completed,
        )
        state = self.client_state if client_state is None else client_state
        with PULSE.meeting("save_checkpoint"):
            path = self._checkpoints.save(location(directory), state, options)
        if self.supervision is not None:
            self.supervision.script_saved(path)
        return path

    def load_checkpoint(self, directory: str | Path) -> tuple[Path | None, dict[str, Any]]:
        """Restore the latest checkpoint below `directory`, or the one that it is; called on every rank.

        Any strategy reads what any other wrote, on any number of ranks. Returns its path and the `client_state` it was
        saved with, or (None, {}) where there is no checkpoint. The first call after `dsplan run` has started the script
        again gives the run's own newest checkpoint where that is the newer one.

        Raises:
            BrokenFile: a file of it is damaged or missing, or it is of another model or optimizer.
        """
        if self.supervision is not None:
            return self.supervision.load(location(directory))
        return self._checkpoints.load(location(directory))

    def read_weights(self, weights: Weights) -> None:
        """Read this rank's parts of the model from files; `initialize` calls it on every rank.

        Raises:
            BrokenFile: a file is damaged or missing.
        """
        with PULSE.meeting("read_weights"):
            weights.read_into(self._states())

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint that is being written in the background is complete; called on every rank.

        Raises:
            BrokenFile: it could not be written.
        """
        self._settle()
        self._checkpoints.wait()

    def export(
        self,
        directory: str | Path,
        *,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
        merged: bool = False,
    ) -> list[Path]:
        """Write the weights as safetensors, with `config.json`, as `from_pretrained` reads them; called on every rank.

        Of a model with adapters, these alone, as `PeftModel.from_pretrained` reads them, unless they are to be
        `merged`. `dsplan.export_checkpoint` describes the arguments and the files that are returned.
        """
        self._settle()
        with PULSE.meeting("export"):
            return self._checkpoints.export(Path(directory), dtype, max_shard_bytes, merged=merged)

    export_checkpoint = export

    def _require_own_share(self, inputs: Any) -> None:
        """Refuse a micro-batch whose loss would be weighted as that of other samples than it has."""
        rows = [leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if rows and self.micro_batch_size not in rows:
            raise CannotRun(
                f"the plan gives rank {self.environment.rank} micro-batches of {self.micro_batch_size} samples"
                f" ({self.configuration.micro_batches}) and the script one of {rows[0]}; hand training_data= to"
                " initialize, or read engine.micro_batch_size samples at a time"
            )

    def _require_whole(self) -> None:
        if self.configuration.pp > 1:
            raise CannotRun(CALL_TRAIN_BATCH)

    def meeting(self, kind: str) -> AbstractContextManager[None]:
        """Mark a part of a step in which every rank takes part as in the forward passes."""
        return PULSE.meeting(kind) if self.gathers_weights else nullcontext()

    def _settle(self) -> None:
        """Complete a checkpoint that was not the script's: that it failed does not end what the script does next."""
        if self.supervision is not None:
            self.supervision.settle()

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self)

    @abstractmethod
    def _whole_parameters(self, *, keeps_changes: bool) -> AbstractContextManager[object]: ...

    @abstractmethod
    def _is_boundary_by_count(self) -> bool:
        """Return whether `step` has been called `gradient_accumulation_steps` times with its next call."""

    @abstractmethod
    def _states(self) -> States:
        """Return the module and the optimizer as checkpoints name them."""

    @abstractmethod
    def _progress(self) -> dict[str, Any]:
        """Return counters and the loss scale, as JSON that `_resume` of every engine reads."""

    @abstractmethod
    def _resume(self, progress: Mapping[str, Any]) -> None:
        """Resume from counters and loss scale that some engine's `_progress` gave."""

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None: ...

    @abstractmethod
    def _step(self) -> None: ...


class AccumulatingEngine(Engine):
    """An engine that counts micro-batches and steps itself: it accumulates, scales, clips and skips as DeepSpeed's."""

    gradient_norm: float | None = None
    skipped_steps: int = 0

    def __init__(self, parts: TrainingParts, strategy: Strategy, scale: LossScale) -> None:
        super().__init__(parts.plan, strategy)
        self.gradient_clipping = parts.gradient_clipping
        self._scale = scale
        self._micro_steps = 0
        self._global_steps = 0

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones too."""
        return self._global_steps

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self._scale.value

    def count_passes(self, micro_batches: int) -> None:
        """Count micro-batches whose passes are over, before the `step` of the last one."""
        self._micro_steps += micro_batches

    @abstractmethod
    def forward_stage(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the pipeline stage whose turn it is, under the plan's precision."""

    @abstractmethod
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's loss as its backward pass begins with it."""

    @abstractmethod
    def backward_stage(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_stage: bool, ends_step: bool
    ) -> None:
        """Add the gradients of a pipeline stage's pass, the last one of its stage, or of all stages of this rank."""

    @abstractmethod
    def backward_weights(self, run: Callable[[], None], *, ends_step: bool) -> None:
        """Take the gradients of a pass of weights alone, which `run` adds to `.grad` without calling a hook."""

    @abstractmethod
    def complete_gradients(self) -> None:
        """Reduce what has not been reduced over data-parallel ranks when all passes of a pipeline's step are over."""

    def _is_boundary_by_count(self) -> bool:
        return (self._micro_steps + 1) % self.configuration.gradient_accumulation_steps == 0

    def _progress(self) -> dict[str, Any]:
        return {
            "global_steps": self._global_steps,
            "skipped_steps": self.skipped_steps,
            "scaler": self._scale.state_dict(),
        }

    def _resume(self, progress: Mapping[str, Any]) -> None:
        self._global_steps, self._micro_steps = progress["global_steps"], 0
        self.skipped_steps = progress["skipped_steps"]
        self._scale.load_state_dict(progress["scaler"])

    def _step(self) -> None:
        acts = self.is_gradient_accumulation_boundary()
        self._micro_steps += 1
        if not acts:
            return
        norm = self._summed_norm() / self._scale.value
        if math.isfinite(norm):
            self.gradient_norm = norm
            clip = min(1.0, self.gradient_clipping / (norm + 1e-6)) if self.gradient_clipping > 0 else 1.0
            self._apply(clip / self._scale.value)
            self._scale.count_step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.gradient_norm = None
            self.skipped_steps += 1
            self._scale.count_overflow()
        self._clear_gradients()
        self._global_steps += 1

    @abstractmethod
    def _summed_norm(self) -> float:
        """Return the norm over all ranks of the step's gradients, which bear the loss scale and are now complete."""

    @abstractmethod
    def _apply(self, factor: float) -> None:
        """Multiply the gradients by `factor` and change the weights everywhere."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Forget the step's gradients, also of parameters that no optimizer trains."""
