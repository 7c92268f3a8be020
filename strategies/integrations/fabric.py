"""FabricStrategy: Lightning's Fabric over dsplan's engine, for `lightning.fabric` and `lightning_fabric`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strategies.checkpoint.export import read_weights
from strategies.config.read import read_config
from strategies.engine.base import Engine
from strategies.engine.torch_engine import TorchEngine, total_norm
from strategies.errors import BrokenFile, CannotRun
from strategies.integrations.json_state import from_json, to_json
from strategies.integrations.lightning_shared import (
    FABRICS,
    EngineStrategy,
    batch_size_of,
    class_for,
    load_whole,
    package_in_use,
    whole_state,
)


class _FabricStrategy(EngineStrategy):
    """Lightning's Fabric over dsplan's engine.

    Args:
        strategy: ddp, fsdp, zero1, …; None leaves it to `config` or the plan.
        backend: `native` or `deepspeed` for ZeRO; None: DeepSpeed where it is installed.
        config: DeepSpeed's keys, a dictionary or a JSON file; `train_micro_batch_size_per_gpu` is what the plan counts
            with. Precision is Fabric's, and the loop accumulates by itself.
        plan: a plan or its file, in the place of one that is made from the model in `fabric.setup`.
    """

    state_name = "fabric"
    saved_by = "fabric.save"
    precision: Any = EngineStrategy.engine_precision
    _set_world_ranks = EngineStrategy.set_world_ranks
    all_reduce = EngineStrategy.reduce
    _loader: Any = None
    _forward: nn.Module | None = None
    _module: nn.Module | None = None

    # Placing the model.

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Place one model and its optimizer under the engine."""
        if len(optimizers) != 1 or self.engine is not None:
            what = f"{len(optimizers)} optimizers" if self.engine is None else "a second model"
            raise CannotRun(f"fabric.setup got {what}; dsplan trains one model with one optimizer")
        given = read_config(self._config)
        size = None if given.micro_batch_size or given.train_batch_size else self._batch_size()
        engine, _ = self._start_engine(module, optimizers[0], self._loader, micro_batch_size=size)
        self._module, self._forward = module, _EngineForward(engine)
        return self._forward, [engine.optimizer], scheduler

    def process_dataloader(self, dataloader: Any) -> Any:
        """Look at the first loader, by custom that of the training data, for the plan."""
        self._loader = dataloader if self._loader is None else self._loader
        return dataloader

    def _batch_size(self) -> int:
        size = batch_size_of(self._loader)
        if size is None:
            self._say(
                "the plan counts with micro-batches of 1 sample: no data loader is set up before the model; call"
                " fabric.setup_dataloaders first, or give config={'train_micro_batch_size_per_gpu': ...}"
            )
        return size or 1

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Put a model that is not trained whole on every rank's device, with rank 0's weights."""
        self._place_whole(module)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Refuse: the optimizer's states are placed with the model.

        Raises:
            CannotRun: always.
        """
        raise CannotRun("dsplan sets up a model together with its optimizer: fabric.setup(model, optimizer)")

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `setup` moves it, since whole models may not fit a device."""

    # Training.

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Make the engine's backward pass."""
        self._backward(tensor, (*args, *kwargs))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Make the engine's step, which clips and clears gradients too."""
        result = None if closure is None else closure()
        engine = self._require_engine()
        engine.set_gradient_accumulation_boundary(True)
        self._step()
        engine.gradient_clipping = self.configured_clipping
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Have the step that follows clip; return the norm, where gradients are whole before it (single, ddp and FSDP).

        A step whose gradients are not finite is skipped and counted, whatever `error_if_nonfinite` says.
        """
        if float(norm_type) != 2.0:
            raise CannotRun(f"gradients are clipped by their 2-norm alone, not norm_type={norm_type}")
        engine = self._require_engine()
        engine.gradient_clipping = float(max_norm)
        if not isinstance(engine, TorchEngine):
            return None
        return total_norm(engine.module, engine.mesh) / engine.loss_scale

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refuse.

        Raises:
            CannotRun: always.
        """
        raise CannotRun("gradients are clipped by their norm alone: fabric.clip_gradients(..., max_norm=...)")

    # Checkpoints.

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a folder of dsplan's where the state has the model that is trained, else Lightning's own file."""
        if not self._has_model(state):
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return
        if filter:
            raise CannotRun(
                "fabric.save cannot leave parts of the model out (filter=): it saves all that training needs"
            )
        others = {name: _state_of(value) for name, value in state.items() if not self._is_engines(value)}
        self._save(path, to_json(others))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        """Restore what is in `state` from a folder of dsplan's or Lightning's own file; return what is left."""
        directory = Path(path)
        if not directory.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc]
        if self._has_model(state):
            client_state = self._load(directory)
        else:
            weights, client_state = read_weights(directory)
            for module in [state] if isinstance(state, nn.Module) else (state or {}).values():
                if isinstance(module, nn.Module):
                    self.load_module_state_dict(module, weights, strict)
        return self._hand_out(state, from_json(client_state.get(self.state_name, {})), directory, strict=strict)

    def _hand_out(self, state: Any, saved: dict[str, Any], path: Path, *, strict: bool) -> dict[str, Any]:
        for name, value in list(state.items()) if isinstance(state, dict) else ():
            if self._is_engines(value) or isinstance(value, nn.Module):
                continue
            if name not in saved:
                if strict:
                    names = ", ".join(saved) or "nothing else"
                    raise BrokenFile(path, f"has no {name!r} (it has {names})", "load with strict=False")
                continue
            content = saved.pop(name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(content)
            else:
                state[name] = content
        return saved

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole weights; every rank calls this together."""
        return whole_state(*self._trained(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Put whole weights into a module; every rank calls this together."""
        load_whole(*self._trained(module), state_dict, strict=strict)

    def _trained(self, module: nn.Module) -> tuple[Engine | None, nn.Module]:
        """Return the engine and the script's module for what `setup` returned, None and the module for any other."""
        return (self.engine, self._module) if module is self._forward and self._module is not None else (None, module)

    def _is_engines(self, value: Any) -> bool:
        return self.engine is not None and (value is self._forward or value is self.engine.optimizer)

    def _has_model(self, state: Any) -> bool:
        values = state.values() if isinstance(state, Mapping) else ()
        return self.engine is not None and any(value is self._forward for value in values)


class _EngineForward(nn.Module):
    """Forward pass that Fabric calls; the parameters are those of the script's module beside it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        vars(self)["_engine"] = engine
        vars(self)["_modules"] = {"module": engine.module}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine: Engine = vars(self)["_engine"]
        engine.module.training = self.training
        return engine(*args, **kwargs)


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


strategy_class = functools.partial(class_for, face=_FabricStrategy)
"""`FabricStrategy` for one package."""
if TYPE_CHECKING:
    FabricStrategy = _FabricStrategy


def __getattr__(name: str) -> Any:
    if name == "FabricStrategy":
        return strategy_class(FABRICS[package_in_use()])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
