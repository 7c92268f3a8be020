"""Optimizers by the plan's names, and the move of an optimizer from whole parameters to their shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES
from strategies.errors import BackendMissing, CannotRun
from strategies.optim.lion import Lion
from strategies.protocols import OptimizerFactory, TrainingParts


def _import_maker(word: str, library: str, name: str) -> OptimizerFactory:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        try:
            module = import_module(f"{library}.optim")
        except ImportError:
            raise BackendMissing(
                f"optimizer {word!r} needs {library}; pip install {library}, or choose optimizer 'adamw'"
            ) from None
        optimizer: torch.optim.Optimizer = getattr(module, name)(parameters)
        return optimizer

    return make


OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-forloop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw-8bit": _import_maker("adamw-8bit", "bitsandbytes", "AdamW8bit"),
    "adamw-8bit-paged": _import_maker("adamw-8bit-paged", "bitsandbytes", "PagedAdamW8bit"),
    "adamw-4bit": _import_maker("adamw-4bit", "torchao", "AdamW4bit"),
    "adamw-fp8": _import_maker("adamw-fp8", "torchao", "AdamWFp8"),
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
}


class ZeroOptimizer(optim.Optimizer):
    """A base for a script's own optimizer that steps each element by itself, so that ZeRO may cut tensors anywhere.

        class Descent(dsplan.ZeroOptimizer):
            def __init__(self, params, lr=1e-3):
                super().__init__(params)
                self.lr = lr

            def step(self):
                for parameter in self.parameters():
                    parameter -= self.lr * parameter.grad

        dsplan.register_optimizer("descent", Descent)

    `step` runs without recording gradients.
    """

    whole_tensors = False

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(params, {"lr": 1e-3, **(defaults or {})})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "step" in vars(cls):
            setattr(cls, "step", torch.no_grad()(vars(cls)["step"]))  # noqa: B010

    @property
    def lr(self) -> float:
        """The rate of the first group; setting it sets that of every group, which schedulers change."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return the parameters that have a gradient in this step."""
        members = (parameter for group in self.param_groups for parameter in group["params"])
        return (parameter for parameter in members if parameter.grad is not None)


def trainable_parameters(model: nn.Module, chosen: Iterable[Any] | None) -> list[Any]:
    """Return the script's own choice of parameters or groups, or every parameter that requires a gradient.

    Raises:
        CannotRun: there is nothing to train.
    """
    parameters = list(chosen) if chosen is not None else [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise CannotRun("the model has no parameter that requires a gradient; unfreeze some before initialize")
    return parameters


class ParameterMove:
    """Follows parameters through a wrapping that replaces them, as `fully_shard` does.

    Make it before the wrapping; afterwards it translates parameters, groups and whole optimizers to the new tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def parameters(self, wrapped: nn.Module, old: Iterable[Any]) -> list[Any]:
        """Return the replacements of parameters, of (name, parameter) pairs, or of groups of either.

        Raises:
            CannotRun: a parameter is not the model's.
        """
        translate = self._translator(wrapped)
        return [_translate(item, translate) for item in old]

    def optimizer(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Point an optimizer at the replacements of its parameters; of its states each rank keeps its shard.

        Raises:
            CannotRun: a parameter is not the model's.
        """
        translate = self._translator(wrapped)
        groups = [[translate(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        for group, new_group in zip(optimizer.param_groups, groups, strict=True):
            for old, new in zip(group["params"], new_group, strict=True):
                if new is not old and old in optimizer.state:
                    states = optimizer.state.pop(old)
                    optimizer.state[new] = {name: _as_shard(value, new) for name, value in states.items()}
            group["params"] = new_group

    def _translator(self, wrapped: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        replacements = dict(wrapped.named_parameters(remove_duplicate=False))

        def translate(parameter: torch.Tensor) -> torch.Tensor:
            name = self._names.get(parameter)
            if name is None:
                raise CannotRun("the optimizer holds a parameter that is not the model's; build it from this model")
            return replacements[name]

        return translate


def _as_shard(value: Any, parameter: torch.Tensor) -> Any:
    is_whole = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
    return sharded_like(value, parameter) if is_whole and isinstance(parameter, DTensor) else value


def sharded_like(value: torch.Tensor, shard: DTensor) -> DTensor:
    """Return the shard that this rank has of a tensor that every rank has whole."""
    return distribute_tensor(value.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)


def _translate(item: Any, translate: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace every parameter of a parameter, a (name, parameter) pair, or a group of either."""
    if isinstance(item, Mapping):
        members = item["params"]
        members = [members] if isinstance(members, torch.Tensor) else members
        return {**item, "params": [_translate(member, translate) for member in members]}
    return (item[0], translate(item[1])) if isinstance(item, tuple) else translate(item)


_ELEMENT_BY_ELEMENT = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
    optim.SparseAdam,
)
"""torch's optimizers that treat every element by itself, so that any part of a tensor can be stepped alone."""

_REFUSES_FLAT = tuple(kind for kind in (getattr(optim, "Muon", None), optim.SparseAdam) if kind is not None)
_ELSEWHERE = "ddp, or zero1 to zero3 with backend 'native'"
WHOLE_TENSORS = "whole_tensors"
"""The attribute of an optimizer, or the option of one of its groups, that says whether it needs whole tensors."""


def needs_whole_tensors(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a group must be stepped whole.

    The group's option `whole_tensors` decides, else the optimizer's attribute of that name. An optimizer that says
    nothing steps whole tensors, unless it is one of torch's that work element by element: norms of tensors (LAMB), rows
    and columns (Adafactor), matrices (Muon, Shampoo) and blocks of 256 values (8-bit) all give other results on parts.
    """
    is_whole = group.get(WHOLE_TENSORS, getattr(optimizer, WHOLE_TENSORS, None))
    return type(optimizer) not in _ELEMENT_BY_ELEMENT if is_whole is None else bool(is_whole)


def select_undivided(optimizer: optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Give those of `parameters` that an optimizer must step whole, now or when it is given them."""
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    return (parameter for parameter in parameters if needs_whole_tensors(optimizer, group_of.get(parameter, {})))


def takes_sparse_gradients_only(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer steps the rows that a gradient has, and refuses gradients that have them all."""
    return isinstance(optimizer, optim.SparseAdam)


def guard_optimizer(parts: TrainingParts) -> TrainingParts:
    """Have an optimizer that the plan's strategy cannot step refused as soon as it is made.

    Raises:
        CannotRun: it exists and cannot be stepped, or the model makes gradients that the strategy cannot reduce.
    """
    given, configuration = parts.optimizer, parts.plan.configuration
    refuse_sparse_layers(parts.model, configuration)
    if isinstance(given, optim.Optimizer):
        refuse_optimizer(given, configuration)
    if given is None or isinstance(given, optim.Optimizer):
        return parts

    def make(parameters: Iterable[Any]) -> optim.Optimizer:
        optimizer = given(parameters)
        refuse_optimizer(optimizer, configuration)
        return optimizer

    return replace(parts, optimizer=make)


def refuse_optimizer(optimizer: optim.Optimizer, configuration: Configuration) -> None:
    """Refuse an optimizer that the configuration's strategy cannot step.

    Raises:
        CannotRun: names the optimizer, and a strategy that can.
    """
    name, strategy = type(optimizer).__name__, configuration.strategy
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CannotRun(
            f"optimizer {name} computes the loss again in a closure, which engine.step() has not; use AdamW, or another"
            " optimizer whose step() takes none"
        )
    if strategy in FSDP_STRATEGIES and isinstance(optimizer, optim.Adafactor):
        raise CannotRun(f"optimizer {name} cannot step the shards of strategy {strategy!r}; use {_ELSEWHERE}")
    is_whole = isinstance(optimizer, _REFUSES_FLAT) or getattr(optimizer, WHOLE_TENSORS, False)
    if configuration.backend == "deepspeed" and (is_whole or any(g.get(WHOLE_TENSORS) for g in optimizer.param_groups)):
        raise CannotRun(f"optimizer {name} cannot step the flat tensors of backend 'deepspeed'; use {_ELSEWHERE}")


def refuse_sparse_layers(model: nn.Module, configuration: Configuration) -> None:
    """Refuse layers with sparse gradients: FSDP2 and DeepSpeed's ZeRO reduce flat dense tensors.

    Raises:
        CannotRun: names the layer, and a strategy that can.
    """
    if configuration.strategy not in FSDP_STRATEGIES and configuration.backend != "deepspeed":
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CannotRun(
                f"{name or 'the model'} makes sparse gradients, which strategy {configuration.strategy!r} of backend"
                f" {configuration.backend!r} cannot reduce; make it with sparse=False, or use {_ELSEWHERE}"
            )
