"""FabricStrategy: Lightning's Fabric over dsplan's engine, for `lightning.fabric` and `lightning_fabric`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from planner import vocabulary as words
from planner.types.plan import Plan
from strategies.checkpoint.export import read_weights
from strategies.config import read_config
from strategies.engine.base import Engine
from strategies.engine.torch_engine import TorchEngine, total_norm
from strategies.errors import BrokenFile, CannotRun
from strategies.integrations.json_state import from_json, to_json
from strategies.integrations.lightning_shared import (
    FABRICS,
    Ranks,
    batch_size_of,
    cluster_environment,
    data_of,
    load_whole,
    merged_config,
    package_in_use,
    start_engine,
    whole_state,
)

_STATE = "fabric"
"""Fabric's part of a checkpoint's client_state."""


class _FabricSide(Ranks):
    """What stands before the `ParallelStrategy` of one of the two packages.

    Args:
        strategy: ddp, fsdp, zero1, …; None leaves it to `config` or the plan.
        backend: `native` or `deepspeed` for ZeRO; None: DeepSpeed where it is installed.
        config: DeepSpeed's keys, a dictionary or a JSON file; `train_micro_batch_size_per_gpu` is what the plan counts
            with. Precision is Fabric's, and the loop accumulates by itself.
        plan: a plan or its file, in the place of one that is made from the model in `fabric.setup`.
    """

    checkpoint_io: Any
    accelerator: Any

    def __init__(
        self,
        strategy: words.Strategy | None = None,
        backend: words.Backend | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        plan: Plan | str | Path | None = None,
    ) -> None:
        self._asked: dict[str, Any] = {"strategy": strategy, "backend": backend, "plan": plan}
        self._config = config
        self._plugin: Any = None
        self._loader: Any = None
        self._forward: nn.Module | None = None
        self._module: nn.Module | None = None
        super().__init__(cluster_environment=cluster_environment(self.library))  # type: ignore[call-arg]
        self._backward_sync_control = _Accumulating(self)

    @property
    def precision(self) -> Any:
        """Lightning's word for the precision; the engine computes in it."""
        if self._plugin is None:
            self.precision = None
        return self._plugin

    @precision.setter
    def precision(self, given: Any) -> None:
        base = import_module(f"{self.library}.plugins.precision").Precision
        self._plugin = base()
        self._plugin.precision = getattr(given, "precision", "32-true")

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    # Placing the model.

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Place one model and its optimizer under the engine."""
        if len(optimizers) != 1 or self.engine is not None:
            what = f"{len(optimizers)} optimizers" if self.engine is None else "a second model"
            raise CannotRun(f"fabric.setup got {what}; dsplan trains one model with one optimizer")
        given = read_config(self._config)
        config = merged_config(
            self._config,
            precision=self.precision.precision,
            micro_batch_size=None if given.micro_batch_size or given.train_batch_size else self._batch_size(),
            accumulation=1,
            clipping=0.0,
        )
        self.engine, _ = start_engine(module, optimizers[0], config, data=data_of(self._loader), **self._asked)
        self._configured_clipping = self.engine.gradient_clipping
        self._module, self._forward = module, _EngineForward(self.engine)
        return self._forward, [self.engine.optimizer], scheduler

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
        """A model that is not trained lies whole on every rank's device, with rank 0's weights."""
        module.to(self.root_device)
        if self._has_peers():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, 0)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Refused: the optimizer's states are placed with the model.

        Raises:
            CannotRun: always.
        """
        raise CannotRun("dsplan sets up a model together with its optimizer: fabric.setup(model, optimizer)")

    def module_to_device(self, module: nn.Module) -> None:
        """`setup` moves it: whole models may not fit a device."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As `reduce`."""
        return self.reduce(tensor, group, reduce_op)

    # Training.

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """The engine's backward pass."""
        if args or kwargs:
            raise CannotRun("backward takes the loss alone: leave out retain_graph and other arguments")
        engine = self._engine()
        self._backward(engine, tensor)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The engine's step, which clips and clears gradients too."""
        result = None if closure is None else closure()
        engine = self._engine()
        engine.set_gradient_accumulation_boundary(True)
        self._step(engine)
        engine.gradient_clipping = self._configured_clipping
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Have the step that follows clip; the norm, where gradients are whole before it (single, ddp and FSDP).

        A step whose gradients are not finite is skipped and counted, whatever `error_if_nonfinite` says.
        """
        if float(norm_type) != 2.0:
            raise CannotRun(f"gradients are clipped by their 2-norm alone, not norm_type={norm_type}")
        engine = self._engine()
        engine.gradient_clipping = float(max_norm)
        if not isinstance(engine, TorchEngine):
            return None
        return total_norm(engine.module, engine.mesh) / engine.loss_scale

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refused.

        Raises:
            CannotRun: always.
        """
        raise CannotRun("gradients are clipped by their norm alone: fabric.clip_gradients(..., max_norm=...)")

    def _engine(self) -> Engine:
        if self.engine is None:
            raise CannotRun("no model is set up for training; call fabric.setup(model, optimizer) before")
        return self.engine

    # Checkpoints.

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """A folder of dsplan's where the state has the model that is trained, else Lightning's own file."""
        engine = self.engine
        if engine is None or not self._names_of_model(state):
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return
        if filter:
            raise CannotRun(
                "fabric.save cannot leave parts of the model out (filter=): it saves all that training needs"
            )
        others = {name: _state_of(value) for name, value in state.items() if not self._is_engines(value)}
        client_state = {**engine.client_state, _STATE: to_json(others)}
        engine.save_checkpoint(Path(self.broadcast(str(path))), client_state, asynchronous=False, keep_last=1)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        """Restore what is in `state` from a folder of dsplan's, or from Lightning's own file; what is left over."""
        engine, directory = self.engine, Path(path)
        if not directory.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc]
        if isinstance(state, Mapping) and engine is not None and self._names_of_model(state):
            found, client_state = engine.load_checkpoint(directory)
            if found is None:
                raise BrokenFile(directory, "holds no checkpoint", "name what fabric.save wrote")
        else:
            weights, client_state = read_weights(directory)
            modules = [state] if isinstance(state, nn.Module) else _modules(state)
            for module in modules:
                load_whole(engine if module is self._forward else None, self._unwrapped(module), weights, strict=strict)
        return self._hand_out(state, from_json(client_state.get(_STATE, {})), directory, strict=strict)

    def _hand_out(self, state: Any, saved: dict[str, Any], path: Path, *, strict: bool) -> dict[str, Any]:
        for name, value in list(state.items()) if isinstance(state, dict) else ():
            if self._is_engines(value) or isinstance(value, nn.Module):
                continue
            if name not in saved:
                if strict:
                    known = ", ".join(saved) or "nothing else"
                    raise BrokenFile(path, f"has no {name!r} (it has {known})", "load with strict=False")
                continue
            content = saved.pop(name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(content)
            else:
                state[name] = content
        return saved

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole weights; every rank calls this together."""
        return whole_state(self.engine if module is self._forward else None, self._unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Put whole weights into a module; every rank calls this together."""
        engine = self.engine if module is self._forward else None
        load_whole(engine, self._unwrapped(module), state_dict, strict=strict)

    def _unwrapped(self, module: nn.Module) -> nn.Module:
        return self._module if module is self._forward and self._module is not None else module

    def _is_engines(self, value: Any) -> bool:
        return self.engine is not None and (value is self._forward or value is self.engine.optimizer)

    def _names_of_model(self, state: Mapping[str, Any]) -> list[str]:
        return [name for name, value in state.items() if self.engine is not None and value is self._forward]


class _EngineForward(nn.Module):
    """What Fabric calls for a forward pass; the parameters are those of the script's module beside it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        vars(self)["_engine"] = engine
        vars(self)["_modules"] = {"module": engine.module}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine: Engine = vars(self)["_engine"]
        engine.module.training = self.training
        return engine(*args, **kwargs)


class _Accumulating:
    """`fabric.no_backward_sync`: what happens inside is not the last micro-batch of its step."""

    def __init__(self, strategy: _FabricSide) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        engine = self._strategy._engine()
        engine.set_gradient_accumulation_boundary(not enabled)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _modules(state: Any) -> list[nn.Module]:
    return [value for value in (state or {}).values() if isinstance(value, nn.Module)]


@functools.cache
def strategy_class(library: str) -> Any:
    """`FabricStrategy` for one package."""
    base = import_module(f"{library}.strategies").ParallelStrategy
    members = {"library": library, "__doc__": _FabricSide.__doc__, "__module__": __name__}
    return type("FabricStrategy", (_FabricSide, base), members)


if TYPE_CHECKING:

    class FabricStrategy(_FabricSide):
        """The strategy, for type checkers."""


def __getattr__(name: str) -> Any:
    if name == "FabricStrategy":
        return strategy_class(FABRICS[package_in_use()])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
