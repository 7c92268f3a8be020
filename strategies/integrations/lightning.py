"""LightningStrategy: Lightning's Trainer over dsplan's engine, for `lightning.pytorch` and `pytorch_lightning`.

The Trainer keeps its loops, hooks, callbacks, loggers and schedulers. The engine has what a strategy is: where the
weights are, forward under the precision, backward, accumulation, clipping, the optimizer's step, and checkpoints.
"""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from planner.types.plan import Configuration
from strategies.checkpoint import rng
from strategies.checkpoint.export import read_weights
from strategies.checkpoint.retention import named_latest
from strategies.distributed.consensus import objects_of_all
from strategies.engine.base import Engine
from strategies.errors import BrokenFile, CannotRun
from strategies.integrations.json_state import from_json, to_json
from strategies.integrations.lightning_shared import (
    FABRICS,
    EngineStrategy,
    PlacedModule,
    backward_inside,
    batch_size_of,
    class_for,
    load_whole,
    package_in_use,
    prepare_backward,
    whole_state,
)
from strategies.integrations.resumable_data import ResumableBatches, cut, has_plain_batches, resumable
from strategies.modules.precision import autocast
from strategies.protocols import Observer
from strategies.supervision.supervision import Supervision

_IN_ENGINE = frozenset({"state_dict", "optimizer_states"})
"""What Lightning would save and the engine does."""
_ONLY_TO_BUILD = ("hyper_parameters", "datamodule_hyper_parameters")
"""What Lightning saves for `load_from_checkpoint` alone."""
_CLIPS_BY_NORM = "gradients are clipped by their norm alone; leave gradient_clip_algorithm='value' out"


class _LightningStrategy(EngineStrategy):
    """Lightning's Trainer over dsplan's engine.

    Args:
        strategy: ddp, fsdp, zero1, …; None leaves it to `config` or the plan.
        backend: `native` or `deepspeed` for ZeRO; None: DeepSpeed where it is installed.
        config: DeepSpeed's keys, a dictionary or a JSON file. Batch, accumulation, precision and clipping are the
            Trainer's.
        plan: a plan or its file, in the place of one that is made from the model when training begins.
    """

    state_name = "lightning"
    saved_by = "trainer.save_checkpoint or ModelCheckpoint"
    model: Any
    optimizers: Any
    lr_scheduler_configs: Any
    lightning_module: Any
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False
    handles_gradient_accumulation = False  # else Lightning would not step at the end of an epoch
    precision_plugin: Any = EngineStrategy.engine_precision
    """With Lightning's hooks around backward and step, which lead to the engine."""
    _layer_sync: Any = None
    _view: PlacedModule | None = None
    _loader_state: Mapping[str, Any] | None = None
    _random: Mapping[str, torch.Tensor] = {}
    _batches: tuple[ResumableBatches, ...] = ()

    def _make_plugin(self, precision: str) -> Any:
        return _plugin_for(self.library)(self, precision)

    # Placing the model.

    def setup(self, trainer: Any) -> None:
        """Place the model: under the engine where it is trained, whole on every rank's device where it is not."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if trainer.state.fn == "fit":
            if self._view is not None:
                raise CannotRun(
                    "this Trainer has trained already; make a new Trainer with a new strategy and a new module"
                )
            self._start(trainer)
        elif self._trains(module):
            return  # after fit, the engine has it
        else:
            self._place_whole(module, torch.bfloat16 if self.precision_plugin.precision == "bf16-true" else None)
        self.model = module

    def _start(self, trainer: Any) -> None:
        module = self.lightning_module
        optimizer, schedulers = self._configure(module)
        loader = _train_loader(trainer)
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            raise CannotRun(_CLIPS_BY_NORM)
        engine, self._view = self._start_engine(
            module if self._layer_sync is None else self._layer_sync.apply(module),
            optimizer,
            loader,
            micro_batch_size=batch_size_of(loader),
            accumulation=trainer.accumulate_grad_batches,
            clipping=float(trainer.gradient_clip_val or 0.0),
        )
        self._require_batches(trainer, loader, engine.configuration)
        self.optimizers, self.lr_scheduler_configs = [engine.optimizer], schedulers
        if engine.supervision is not None:
            self._let_supervise(trainer, engine, engine.supervision)

    def _configure(self, module: Any) -> tuple[torch.optim.Optimizer, list[Any]]:
        """Call `configure_optimizers` and return its one optimizer and its schedulers.

        Raises:
            CannotRun: there are several optimizers or none, or the module has a backward pass of its own.
        """
        library = import_module(self.library)
        name = type(module).__name__
        if type(module).backward is not library.LightningModule.backward:
            raise CannotRun(f"{name}.backward would not be called: the engine makes the backward pass; remove it")
        core = import_module(f"{self.library}.core.optimizer")
        optimizers, schedulers = core._init_optimizers_and_lr_schedulers(module)
        usable = [item for item in optimizers if isinstance(item, torch.optim.Optimizer)]
        if len(optimizers) != 1 or not usable:
            raise CannotRun(
                f"{name}.configure_optimizers returns {len(usable)} optimizers; dsplan trains with one: put the"
                " parameters into its groups, or use Lightning's own strategy"
            )
        return usable[0], schedulers

    def _require_batches(self, trainer: Any, loader: Any, chosen: Configuration) -> None:
        """Let the loop follow a plan that cuts its batches otherwise; `process_dataloader` cuts them.

        Raises:
            CannotRun: the plan's micro-batch is not that of the data loader, which chooses its batches itself.
        """
        size = batch_size_of(loader)
        if size is not None and size != chosen.micro_batch_size and not has_plain_batches(loader):
            raise CannotRun(
                f"the plan has micro-batches of {chosen.micro_batch_size} samples and the data loader makes {size}; set"
                f" its batch_size to {chosen.micro_batch_size}, or plan again with --micro-batch {size}"
            )
        if trainer.accumulate_grad_batches != chosen.gradient_accumulation_steps:
            self._say(
                f"the plan replaces accumulate_grad_batches {trainer.accumulate_grad_batches} ->"
                f" {chosen.gradient_accumulation_steps}"
            )
            trainer.accumulate_grad_batches = chosen.gradient_accumulation_steps
        if size not in (None, chosen.micro_batch_size):
            self._say(f"the plan replaces batch_size {size} -> {chosen.micro_batch_size}")

    def model_to_device(self) -> None:
        """Do nothing: the engine has moved it."""

    def _trains(self, module: Any) -> bool:
        return self._view is not None and vars(self._view)["_target"] is module

    # Running it.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own, as the engine's forward pass."""
        if self.lightning_module.automatic_optimization:
            is_last = not self.lightning_module.trainer.fit_loop._should_accumulate()
            self._require_engine().set_gradient_accumulation_boundary(is_last)
        return self._run("training_step", *args, **kwargs)

    def _run(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module's; every rank runs as many."""
        module = self.lightning_module
        if self.engine is None or self._view is None or not self._trains(module):
            mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(self.precision_plugin.precision, "fp32")
            with autocast(mixed, self.root_device):
                return getattr(module, method)(*args, **kwargs)
        view = self._view
        view.method, view.training = method, module.training
        by_hand = method == "training_step" and not module.automatic_optimization
        try:
            with backward_inside(self.engine, view) if by_hand else nullcontext():
                return self.engine(*args, **kwargs)
        finally:
            view.method = "forward"

    validation_step = functools.partialmethod(_run, "validation_step")
    test_step = functools.partialmethod(_run, "test_step")
    predict_step = functools.partialmethod(_run, "predict_step")

    def backward_of(self, loss: torch.Tensor, rest: Collection[object]) -> None:
        """Make the engine's backward pass; called by the precision plugin."""
        if not self.lightning_module.automatic_optimization:
            prepare_backward(self._require_engine())
        self._backward(loss, rest)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let the training data go on where it was after a restart."""
        stateful = import_module(f"{FABRICS[self.library]}.utilities.types")._Stateful
        if not self.lightning_module.trainer.training or isinstance(dataloader, stateful):
            return dataloader
        if self.engine is not None:
            cut(dataloader, self.engine.configuration.micro_batch_size)
        batches = resumable(dataloader)
        if batches is None:
            if self._loader_state is not None:
                self._say("the training data has no sampler to go on with, and begins with its first sample again")
        elif batches not in self._batches:
            self._batches = (*self._batches, batches)
            self._pass_over(batches, len(self._batches) - 1)
        return dataloader

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: weights are the engine's to save."""
        return {} if self.engine is not None else dict(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: they are the engine's to save."""
        return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the engine has loaded them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder of dsplan's, which any strategy reads, or one file for the weights alone."""
        if self.engine is not None and "optimizer_states" in checkpoint:
            self._save(filepath, self._loop_state(checkpoint))
            return
        checkpoint["state_dict"] = whole_state(self.engine, self.lightning_module)
        path = Path(self.broadcast(str(filepath)))
        if self.global_rank == 0:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _loop_state(self, checkpoint: Mapping[str, Any]) -> Any:
        """Return what Lightning keeps beside the weights, as JSON; what only builds the module may be left out."""
        state = {name: value for name, value in checkpoint.items() if name not in _IN_ENGINE}
        for name in _ONLY_TO_BUILD:
            for key, value in dict(state.get(name) or {}).items():
                try:
                    to_json(value, f"{name}.{key}")
                except CannotRun as problem:
                    self._say(f"{problem}: it is not in the checkpoint")
                    state[name] = {other: state[name][other] for other in state[name] if other != key}
        state["dsplan_data"] = self._data_state()
        return to_json(state)

    def _data_state(self) -> dict[str, Any]:
        """Return where every rank is in its data: batches of this epoch, and what they were drawn with."""
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        return {
            "batches": loop.batch_progress.current.processed,
            "samples_per_batch": self._samples_per_batch,
            "began": objects_of_all([batches.began for batches in self._batches]),
        }

    @property
    def _samples_per_batch(self) -> int:
        """Samples of all ranks together."""
        size = 1 if self.engine is None else self.engine.configuration.micro_batch_size
        return size * self.world_size

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load one of dsplan's folders, or take the weights of a file that Lightning wrote."""
        path = Path(checkpoint_path)
        if path.is_file():
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            if self.engine is not None and checkpoint.get("optimizer_states"):
                self._say(
                    f"{path} was written by another strategy: its weights, loops and schedulers are loaded; the"
                    " optimizer begins anew"
                )
            return checkpoint
        state = self._load_weights(path) if self.engine is None else self._load(path)
        if self.state_name not in state:
            raise BrokenFile(path, "was not saved by a Trainer", "load it with engine.load_checkpoint")
        return self._restore(state)

    def _load_weights(self, path: Path) -> Mapping[str, Any]:
        """Load a checkpoint's weights into a module that is not trained here, and return the client_state."""
        self._require_checkpoint(path, named_latest(path))
        weights, state = read_weights(path)
        self.lightning_module.load_state_dict(weights, strict=self.lightning_module.strict_loading)
        return state

    def _restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return Lightning's part of a checkpoint, as its connector restores it."""
        own = from_json(state[self.state_name])
        self._loader_state = own.pop("dsplan_data", None)
        if self._loader_state is not None and self.engine is not None:
            self._random = rng.tensors(self.global_rank)
            _recount(own["loops"]["fit_loop"], self._loader_state["samples_per_batch"], self._samples_per_batch)
            for index, batches in enumerate(self._batches):
                self._pass_over(batches, index)
        return {"state_dict": {}, **own}

    def _pass_over(self, batches: ResumableBatches, index: int) -> None:
        """Have a loader go on where the checkpoint was made."""
        state = self._loader_state
        if state is None:
            return
        trained = state["batches"] * state["samples_per_batch"] // self._samples_per_batch
        ranks = state["began"]
        began = ranks[self.global_rank if self.global_rank < len(ranks) else 0]
        if trained < len(batches) and index < len(began):
            batches.resume(trained, began[index], lambda: rng.restore(self._random, self.global_rank))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights of Lightning's own file; those of dsplan's folder are there already."""
        if weights := checkpoint.get("state_dict"):
            load_whole(self.engine, self.lightning_module, weights, strict=strict)

    # Under `dsplan run`.

    def _let_supervise(self, trainer: Any, engine: Engine, supervision: Supervision) -> None:
        """Save, resume and stop between batches, when Lightning's loops are where a restart finds them again."""
        engine.client_state_source = lambda: {
            **engine.client_state,
            self.state_name: self._loop_state(trainer._checkpoint_connector.dump_checkpoint(weights_only=False)),
        }
        engine.observers[engine.observers.index(supervision)] = _BetweenBatches(supervision)
        trainer.callbacks.append(_batch_ends(self.library)(engine, supervision))
        state = supervision.resumed_state
        if state is not None and self.state_name in state:
            trainer._checkpoint_connector._loaded_checkpoint = self._restore(state)

    def on_train_start(self) -> None:
        """Have SIGTERM save and stop, as before Lightning's handler, which broadcasts in the midst of anything."""
        if self.engine is not None and self.engine.supervision is not None:
            before = self.lightning_module.trainer._signal_connector._original_handlers
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, before.get(signal.SIGTERM, signal.SIG_DFL))

    def teardown(self) -> None:
        """Leave the module where it is: the engine has it, for evaluation and for saving."""
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self.engine is not None:
            for observer in self.engine.observers:
                observer.close()


class _BetweenBatches(Observer):
    """Passes on to the supervision what happens in a step, but not its end: the batch is not over."""

    def __init__(self, supervision: Supervision) -> None:
        for name in ("forward_starts", "loss_is", "starts", "ends", "close"):
            setattr(self, name, getattr(supervision, name))


@functools.cache
def _batch_ends(library: str) -> Any:
    """Return the callback that notifies the supervision of steps when their batch is over."""

    class BatchEnds(import_module(library).Callback):  # type: ignore[misc]
        def __init__(self, engine: Engine, supervision: Supervision) -> None:
            self._engine, self._supervision = engine, supervision
            self._steps = engine.global_steps

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            if self._engine.global_steps != self._steps:
                self._steps = self._engine.global_steps
                self._supervision.step_ended()

    return BatchEnds


@functools.cache
def _plugin_for(library: str) -> Any:
    """Return the class of a `Precision` that calls the engine, over that of one package."""

    class EnginePrecision(import_module(f"{library}.plugins.precision").Precision):  # type: ignore[misc]
        def __init__(self, strategy: Any, precision: str) -> None:
            self._strategy, self.precision = strategy, precision

        def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._strategy.backward_of(tensor, (*args, *kwargs))

        def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            result = closure()
            if model.automatic_optimization and result is None:
                return None  # training_step returned None: there is no gradient
            self._after_closure(model, optimizer)
            self._strategy._step()
            return result

        def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
            if gradient_clip_algorithm not in (None, "norm"):
                raise CannotRun(_CLIPS_BY_NORM)
            strategy = self._strategy
            strategy.engine.gradient_clipping = float(clip_val) if clip_val else strategy.configured_clipping

    return EnginePrecision


def _train_loader(trainer: Any) -> Any:
    """Return the script's training data loader, the first where it has several; the random numbers stay as they are."""
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        return None
    states = torch.get_rng_state(), random.getstate()
    loader = source.dataloader()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    while isinstance(loader, (list, tuple, dict)) or hasattr(loader, "flattened"):
        loader = getattr(loader, "flattened", loader)
        loader = next(iter(loader.values() if isinstance(loader, dict) else loader), None)
    return loader


def _recount(loop: dict[str, Any], before: int, now: int) -> None:
    """Let the fit loop's counters of batches count those of `now` samples, where they were of `before`."""
    for counts in loop["epoch_loop.batch_progress"].values():
        if before != now and isinstance(counts, dict):
            processed = counts["processed"]
            moved = processed * before // now - processed
            counts.update({name: count + moved for name, count in counts.items()})


strategy_class = functools.partial(class_for, face=_LightningStrategy)
"""`LightningStrategy` for one package."""
if TYPE_CHECKING:
    LightningStrategy = _LightningStrategy


def __getattr__(name: str) -> Any:
    if name == "LightningStrategy":
        return strategy_class(package_in_use())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
