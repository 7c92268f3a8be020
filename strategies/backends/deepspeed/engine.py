"""ZeRO stages 1 to 3 through DeepSpeed: its engine behind the calls of ours."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardware_db.files import provide_torch_extensions
from hardware_db.notices import notice
from planner.emit.common import EmitOptions
from planner.emit.deepspeed import deepspeed_config
from strategies.backends.deepspeed.states import DeepSpeedStates, scale_of, state_tensors, take_scale, whole
from strategies.config.names import plain
from strategies.distributed.environment import Environment, ensure_group
from strategies.distributed.gathers import note_gathers
from strategies.engine.base import Engine, Strategy
from strategies.errors import BackendMissing, CannotRun
from strategies.modules.activation_checkpointing import apply_plan
from strategies.modules.compression import gradient_travel
from strategies.modules.precision import WEIGHT_DTYPE, narrow_inputs
from strategies.optim.optimizers import OPTIMIZERS, trainable_parameters
from strategies.parallel.empty import cast, give_memory
from strategies.protocols import TrainingParts
from strategies.torch_compat.autograd import plain_linear
from strategies.torch_compat.profiling import build_directory
from strategies.tracing.step.checkpointing import keeps_products

# ZeRO-3 from a model that lies on the host: split parameter by parameter.


def partition_model(library: Any, model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Split a model's parameters over all ranks in the dtype that `config` trains in; rank 0's values count.

    The device holds one whole parameter at a time. A model made under `deepspeed.zero.Init` is split already.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return
    # DeepSpeed reads the number of ranks from its own view of torch's process group, which `initialize` opens later.
    library.init_distributed(dist_backend=torch.distributed.get_backend())
    dtype = _dtype(config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = cast(parameter.data, dtype)
    if device.type == "cpu":
        give_memory(model.parameters(), device)  # elsewhere they get it as they go there, one by one
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    library.zero.Init(module=model, config_dict_or_path=dict(config), dtype=dtype)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


# Sections a plan decides; whatever else a script's config says is DeepSpeed's to read.
_PLANNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "fp16")


class DeepSpeedZero(Strategy):
    """Stage 1 shards optimizer states, stage 2 gradients too, stage 3 parameters too."""

    def engine(self, parts: TrainingParts) -> DeepSpeedEngine:
        """Hand the model to DeepSpeed, with the plan as its config."""
        library = _library(self.environment.device, self.configuration.strategy)
        torch.nn.functional.linear = plain_linear  # an earlier stage-3 engine of this process replaced it
        require_precision(self.configuration.precision)
        gradient_travel(parts)  # refuses what DeepSpeed does not do
        ensure_group(self.environment)
        apply_plan(parts)
        config = engine_config(parts, on_cpu=self.environment.device.type == "cpu")
        if self.configuration.zero_stage == 3:
            partition_model(library, parts.model, config, self.environment.device)
        else:
            give_memory(parts.model.parameters(), self.environment.device)
        optimizer = self._optimizer(parts, config)
        if optimizer is None and self.configuration.offload != "none" and self.environment.device.type == "cuda":
            expect_compilation("cpu_adam", self.environment)
        if optimizer is not None:
            config.pop("optimizer", None)
            config["zero_allow_untested_optimizer"] = True
            # With offload it would insist on an optimizer of its own; the script's steps the same states.
            config.setdefault("zero_force_ds_cpu_optimizer", False)
        engine, wrapped, _, scheduler = library.initialize(
            model=parts.model,
            optimizer=optimizer,
            model_parameters=trainable_parameters(parts.model, parts.model_parameters),
            lr_scheduler=parts.lr_scheduler,
            config=config,
        )
        return DeepSpeedEngine(engine, wrapped, scheduler, strategy=self, parts=parts)

    def _optimizer(self, parts: TrainingParts, config: Mapping[str, Any]) -> Any:
        """Return the script's optimizer, or torch's for the plan's name, or None if DeepSpeed must make its own.

        DeepSpeed makes the ones of the script's config that are its own, and under offload those for the CPU, which
        the plan's time was counted for.
        """
        if parts.optimizer is not None:
            return parts.optimizer
        if parts.script.optimizer is not None:
            _require_known(parts.script.optimizer.name)
            return None
        if self.configuration.offload != "none" and "optimizer" in config:
            return None
        return OPTIMIZERS[self.configuration.optimizer](trainable_parameters(parts.model, parts.model_parameters))


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine, which scales, clips, accumulates, steps and saves by itself.

    It skips steps whose gradients are not finite in fp16 alone.
    """

    def __init__(
        self, engine: Any, optimizer: Any, scheduler: Any, *, strategy: DeepSpeedZero, parts: TrainingParts
    ) -> None:
        super().__init__(parts.plan, strategy)
        self.strategy = strategy
        self.module = parts.model
        self.wrapped = engine
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        if self.gathers_weights:
            note_gathers([self.module], _is_sharded)

    @property
    def global_steps(self) -> int:
        """Steps of the optimizer since training began."""
        return int(self._deepspeed.global_steps)

    @property
    def gradient_norm(self) -> float | None:
        """Of the last step, before clipping; None where it was not finite."""
        norm = self._deepspeed.get_global_grad_norm()
        return float(norm) if norm is not None and math.isfinite(norm) else None

    @property
    def skipped_steps(self) -> int:
        """Steps without an update, for gradients that were not finite."""
        return int(self._deepspeed.skipped_steps)

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1 where there is none."""
        return float(getattr(self._deepspeed.optimizer, "loss_scale", 1.0))

    def state_tensors(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Return the rank's tensors by what they are."""
        return state_tensors(self.module, self._deepspeed.optimizer)

    def _whole_parameters(self, *, keeps_changes: bool) -> AbstractContextManager[object]:
        return whole(self.module, self.configuration.zero_stage, keeps_changes=keeps_changes)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Have DeepSpeed step, or not, at its next step, whatever it counts."""
        super().set_gradient_accumulation_boundary(is_boundary)
        self._deepspeed.set_gradient_accumulation_boundary(is_boundary)

    @property
    def gradient_clipping(self) -> float:
        """The norm that DeepSpeed clips gradients to."""
        return float(self._deepspeed.optimizer.clip_grad)

    @gradient_clipping.setter
    def gradient_clipping(self, norm: float) -> None:
        self._deepspeed.optimizer.clip_grad = norm

    def _is_boundary_by_count(self) -> bool:
        return bool(self._deepspeed.is_gradient_accumulation_boundary())

    def _states(self) -> DeepSpeedStates:
        return DeepSpeedStates(self.module, self._deepspeed.optimizer)

    def _progress(self) -> dict[str, Any]:
        return {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "scaler": scale_of(self._deepspeed.optimizer.loss_scaler),
        }

    def _resume(self, progress: Mapping[str, Any]) -> None:
        engine, steps = self._deepspeed, progress["global_steps"]
        engine.global_steps, engine.skipped_steps = steps, progress["skipped_steps"]
        engine.micro_steps = steps * self.configuration.gradient_accumulation_steps
        engine.global_samples = steps * self.configuration.global_batch_size
        take_scale(engine.optimizer.loss_scaler, progress["scaler"])

    @property
    def _deepspeed(self) -> Any:
        return self.wrapped

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed casts inputs of its own accord in fp16 alone.
        args, kwargs = narrow_inputs((args, kwargs), WEIGHT_DTYPE.get(self.configuration.precision))
        return self.wrapped(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        self._deepspeed.backward(loss)

    def _step(self) -> None:
        self._deepspeed.step()


def _is_sharded(module: nn.Module) -> bool:
    """Return whether DeepSpeed would all-gather some of a module's parameters; small ones stay whole."""
    return any(getattr(getattr(p, "ds_status", None), "name", "") == "NOT_AVAILABLE" for p in module.parameters())


def engine_config(parts: TrainingParts, *, on_cpu: bool) -> dict[str, Any]:
    """Return the plan as DeepSpeed's config, with what the script's own config adds to it.

    The plan decides stage, batch and precision; details of these and every other key are the script's where it has any.
    """
    script = parts.script.values
    config = deepspeed_config(parts.plan, EmitOptions(cpu=on_cpu, gradient_clipping=parts.gradient_clipping))
    if planned := _section(config, "optimizer"):  # steps as the one that is made where DeepSpeed makes none
        usual = OPTIMIZERS[parts.plan.configuration.optimizer]([torch.zeros(1)]).defaults
        rates = {name: usual[name] for name in ("lr", "weight_decay")}
        config["optimizer"] = {**planned, "params": {**_section(planned, "params"), **rates}}
    zero = {**_section(config, "zero_optimization"), **_section(script, "zero_optimization")}
    zero["stage"] = parts.plan.configuration.zero_stage
    bucket = parts.script.communication.bucket_elements(4 if parts.plan.configuration.precision == "fp32" else 2)
    if bucket is not None:
        zero["reduce_bucket_size"] = bucket
    if parts.plan.configuration.activation_checkpointing == "selective" or keeps_products(parts.model):
        # Stage 3's own linear adds the bias in place to the product that selective checkpointing keeps.
        zero["memory_efficient_linear"] = False
    precisions = [name for name in ("bf16", "fp16") if name in config]
    details: dict[str, Any] = {
        name: {**_section(config, name), **_section(script, name), "enabled": True} for name in precisions
    }
    own = {key: value for key, value in script.items() if key not in _PLANNED}
    return {**config, **own, **details, "zero_optimization": zero, "gradient_clipping": parts.gradient_clipping}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _require_known(optimizer: str) -> None:
    """Stop at an optimizer that this version of DeepSpeed has lost, or has not got yet.

    Raises:
        CannotRun: naming it.
    """
    names: list[str] = import_module("deepspeed.runtime.config").DEEPSPEED_OPTIMIZERS
    if plain(optimizer) not in names:
        raise CannotRun(
            f"config: this DeepSpeed has no optimizer {optimizer}; use AdamW, or one of its own: {', '.join(names)}"
        )


def why_impossible(precision: str) -> str | None:
    """Return why DeepSpeed cannot train in a precision on this rank's device, as its accelerator says."""
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    is_supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    kind = precision.partition("-")[0]
    if kind not in is_supported or is_supported[kind]():
        return None
    name = accelerator.device_name()
    return f"DeepSpeed has no {kind} on this machine's {name}; use backend 'native' or another precision"


def require_precision(precision: str) -> None:
    """Stop where DeepSpeed cannot train in a precision on this rank's device.

    Raises:
        CannotRun: it cannot.
    """
    if (reason := why_impossible(precision)) is not None:
        raise CannotRun(reason)


def expect_compilation(operator: str, environment: Environment) -> None:
    """Say once that DeepSpeed is about to compile an operator, which takes minutes on a busy machine.

    torch lets one process compile and the others wait for its lock, which stays where that process was killed. Then
    they would wait for ever.

    Raises:
        CannotRun: there is such a lock, and no process of this machine holds it.
    """
    directory = build_directory(operator)
    lock = directory / "lock"
    if lock.exists() and not environment.spans_nodes and not _is_open_somewhere(lock) and lock.exists():
        raise CannotRun(
            f"{lock} is left of a run that was ended while DeepSpeed compiled {operator}, and torch would wait for it"
            " for ever; remove it"
        )
    if environment.is_main and not (directory / f"{operator}.so").exists():
        notice(f"DeepSpeed compiles {operator} before the first step, once; that takes a minute or more")


def _is_open_somewhere(path: Path) -> bool:
    """Return whether a process of this machine has a file open; True where nothing says so."""
    if not Path("/proc/self/fd").exists():
        return True
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if os.path.samefile(link, path):
                return True
    return False


def _library(device: torch.device, strategy: str) -> Any:
    provide_torch_extensions(os.environ)
    if device.type == "cpu":
        # DeepSpeed looks for an accelerator when it is imported; without one it must be told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        library = import_module("deepspeed")
    except ImportError as problem:
        remedy = "pip install dsplan[deepspeed], or use backend 'native', which shards the same without it"
        raise BackendMissing(f"strategy {strategy!r} needs DeepSpeed ({problem}); {remedy}") from None
    # DeepSpeed calls collectives by names that newer torch deprecates; a script's author can do nothing about it.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    if device.type == "cpu":
        # Its shared-memory collectives serve inference alone, and would be compiled before the first step.
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library
