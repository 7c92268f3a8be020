"""Saved states of an engine and their names: `model/<name>` and `optimizer/<state>/<parameter>`.

An engine describes itself by a subclass of `States`: which tensor on this rank stands for which parameter, and where it
begins in it. Whatever the strategy, what is saved is the same: fp32 masters where there are any, optimizer states in
the parameter's shape, numbers (steps) once per parameter. Where ranks split the model between them, a rank has parts of
the whole parameters, and names of its own pipeline stage alone: `Inventory` is what all of them have together.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from strategies.checkpoint.parts import PartOfTensor
from strategies.errors import CannotRun
from strategies.parallel.split import ModelParts, Split, parts_of

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """Tensors of a module's state dict, each once.

    Attributes:
        tensors: every parameter and persistent buffer under its first name.
        aliases: further names of tied tensors, with the first.
        extra: what modules keep beside tensors (`get_extra_state`), where it is JSON.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]

    def of_parameters(self) -> dict[torch.Tensor, str]:
        """Return the names by tensor."""
        return {tensor: name for name, tensor in self.tensors.items()}


def names_of(module: nn.Module) -> ModuleNames:
    """Return the tensors of a module by the names that they have in it, without those of wrappers around its parts.

    Raises:
        CannotRun: a module's extra state is neither a tensor nor JSON.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first: dict[int, str] = {}
    for wrapped_name, value in module.state_dict(keep_vars=True).items():
        name = unwrapped(wrapped_name)
        if not isinstance(value, torch.Tensor):
            extra[name] = _plain(name, value)
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value
    return ModuleNames(tensors=tensors, aliases=aliases, extra=extra)


def load_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Hand extra states back to the modules that kept them."""
    for prefix, part in module.named_modules():
        key = unwrapped(f"{prefix}._extra_state" if prefix else "_extra_state")
        if key in extra:
            part.set_extra_state(extra[key])


def is_json(value: Any) -> bool:
    """Return whether a value is made of JSON's kinds (and tuples) alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return all(is_json(item) for item in value)
    return isinstance(value, dict) and all(isinstance(key, str) and is_json(item) for key, item in value.items())


def _plain(name: str, value: Any) -> Any:
    if not is_json(value):
        raise CannotRun(
            f"checkpoint: {name} is a {type(value).__name__}; let get_extra_state return a tensor, or JSON (numbers,"
            " texts, lists, dicts)"
        )
    return value


def unwrapped(name: str) -> str:
    """Return a module's or tensor's name without those of wrappers around its parts."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _canonical(names: ModuleNames, shared: Mapping[str, str]) -> ModuleNames:
    """Return the names under which a checkpoint holds tensors that several pipeline stages have."""
    others = {name: canonical for name, canonical in shared.items() if name != canonical and name in names.tensors}
    return ModuleNames(
        tensors={others.get(name, name): tensor for name, tensor in names.tensors.items()},
        aliases={alias: others.get(name, name) for alias, name in names.aliases.items()} | others,
        extra=names.extra,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Inventory of a rank's module and optimizer, in JSON; of several ranks, what all of them have.

    Attributes:
        names: of parameters and persistent buffers, in the order of the model.
        aliases, extra: as in `ModuleNames`.
        optimizer: its class, its groups (names of their parameters, and options), and which of its states are plain
            numbers.
        blocks: the repeated blocks of each of this rank's pipeline stages.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    blocks: tuple[range, ...] = ()


def together(inventories: Sequence[Inventory]) -> Inventory:
    """Return what all ranks have that hold different parts of one model; their optimizers have the same groups."""
    if len(inventories) == 1:
        return inventories[0]
    order = _order(inventories)
    names = sorted({name for each in inventories for name in each.names}, key=lambda name: order[name])
    groups: list[dict[str, Any]] = []
    for index in range(max(len(each.optimizer["groups"]) for each in inventories)):
        alike = [each.optimizer["groups"][index] for each in inventories if index < len(each.optimizer["groups"])]
        members = {name for group in alike for name in group["parameters"]}
        options = next((group["options"] for group in alike if group["parameters"]), alike[0]["options"])
        groups.append({"parameters": sorted(members, key=lambda name: order[name]), "options": options})
    return Inventory(
        names=tuple(names),
        aliases={alias: name for each in inventories for alias, name in each.aliases.items()},
        extra={name: value for each in inventories for name, value in each.extra.items()},
        optimizer={
            "class": inventories[0].optimizer["class"],
            "groups": groups,
            "numbers": sorted({key for each in inventories for key in each.optimizer["numbers"]}),
        },
    )


def _order(inventories: Sequence[Inventory]) -> dict[str, tuple[float, int]]:
    """Return where names stand in the whole model: what precedes the blocks, these by number, what follows them."""
    order: dict[str, tuple[float, int]] = {}
    for each in inventories:
        own = {block for stage in each.blocks for block in stage}
        matches = [re.search(r"\.(\d+)\.", name) for name in each.names]
        numbers = [int(match[1]) if match and int(match[1]) in own else None for match in matches]
        first = next((index for index, number in enumerate(numbers) if number is not None), 0)
        for index, (name, number) in enumerate(zip(each.names, numbers, strict=True)):
            outside = -1.0 if not each.blocks or (index < first and 0 in own) else float("inf")
            order.setdefault(name, (outside if number is None else float(number), len(order)))
    return order


SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch's optimizers that are one number for the parameter, whatever its shape; a scalar's others are not."""
MODEL = "model/"
OPTIMIZER = "optimizer/"
IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options that say how an optimizer computes and not what; they stay as they are where training continues."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A trained parameter on this rank.

    Attributes:
        name: its first name in the model.
        group: the options of its group in the optimizer.
        tensor: what the optimizer changes here: the parameter, a DTensor of it, or a piece, maybe empty.
        shape: of the whole parameter.
        start: where a flat piece begins in the parameter, or in this rank's part of it; None if `tensor` has the
            parameter's own shape, or that of the part.
        split: which part of the parameter this rank has, or None if ranks do not split it.
        writes: whether this rank writes its piece; if not, another one has the same.
    """

    name: str
    group: dict[str, Any]
    tensor: torch.Tensor
    shape: torch.Size
    start: int | None = None
    split: Split | None = None
    writes: bool = True

    @property
    def is_absent(self) -> bool:
        """True if another rank owns the undivided parameter, with all of its states."""
        return self.start is None and self.tensor.numel() == 0 and self.shape.numel() > 0

    @property
    def is_partial(self) -> bool:
        """True if this rank has some of the parameter's elements only."""
        return (self.start is not None or self.split is not None) and self.tensor.numel() != self.shape.numel()

    def is_number(self, key: str, shape: torch.Size) -> bool:
        """Return whether a state of this shape is one number for the whole parameter."""
        return not shape and (key in SCALARS or bool(self.shape))

    def saved(self, value: torch.Tensor) -> Any:
        """Return a tensor like `tensor`, as part of the whole one."""
        if self.start is not None:
            return PartOfTensor.of_run(value, self.shape, self.start, split=self.split, writes=self.writes)
        return value if self.split is None else PartOfTensor.of_split(value, self.split)

    def state_name(self, key: str) -> str:
        """Return the name of a state in a checkpoint."""
        return f"{OPTIMIZER}{key}/{self.name}"


class States(ABC):
    """A module and its optimizer, each tensor by its name."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.parts: ModelParts = parts_of(module)
        own = names_of(module)
        self.names: ModuleNames = _canonical(own, self.parts.shared)
        self._own_names = own.of_parameters()
        self._splits: dict[torch.Tensor, Split] = {}
        for name, split in self.parts.splits.items():
            tensor = own.tensors.get(own.aliases.get(name, name))
            if tensor is not None:
                self._splits[tensor], self._own_names[tensor] = split, name
        self.whole: Inventory | None = None
        """What the ranks have together that hold different parts of the model, where it was asked for."""
        self.leaves_out: frozenset[str] = frozenset()
        """Names of weights that are neither saved nor looked for."""

    def weight(self, tensor: torch.Tensor) -> Any:
        """Return a parameter or buffer as it is saved and read in place: itself, or part of a whole, or its master."""
        split = self.split_of(tensor)
        return tensor.detach() if split is None else PartOfTensor.of_split(tensor, split)

    @abstractmethod
    def places(self) -> Iterator[Place]:
        """Yield every parameter that the optimizer trains, groups in order."""

    def shape_of(self, tensor: torch.Tensor) -> torch.Size:
        """Return the whole shape of a parameter or buffer."""
        split = self.split_of(tensor)
        return tensor.shape if split is None else torch.Size(split.shape)

    def split_of(self, tensor: torch.Tensor) -> Split | None:
        """Return which part of a whole parameter or buffer this rank has; None if it is not split."""
        return self._splits.get(tensor)

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank writes its run: the first of those that have the same, maybe cut otherwise."""
        name = self._own_names.get(tensor)
        return name is None or (self.parts.copy_of(name)[0] == 0 and self.parts.is_counted(name))

    def states_of(self, parameter: Place) -> Mapping[str, Any]:
        """Return the optimizer's states of a parameter: tensors like `parameter.tensor`, others, and numbers."""
        states: Mapping[str, Any] = self.optimizer.state.get(parameter.tensor, {})
        return states

    def room_for(self, parameter: Place, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor like `parameter.tensor` to read a state into."""
        return torch.empty_like(parameter.tensor, dtype=dtype, requires_grad=False)

    def keep(self, parameter: Place, states: dict[str, Any]) -> None:
        """Make `states` the optimizer's, where there are any."""
        self.optimizer.state.pop(parameter.tensor, None)
        if states:
            self.optimizer.state[parameter.tensor] = states

    @abstractmethod
    def updated(self) -> None:
        """Bring what is derived from weights and states up to date: they have been read."""

    def weights(self) -> dict[str, Any]:
        """Return the model, by the names of a checkpoint; tensors without elements are left out."""
        return {
            f"{MODEL}{name}": self.weight(tensor)
            for name, tensor in self.names.tensors.items()
            if name not in self.leaves_out and self.shape_of(tensor).numel()
        }

    def tensors(self) -> dict[str, Any]:
        """Return all that is saved."""
        tensors = self.weights()
        for parameter in self.places():
            for key, value in () if parameter.is_absent else self.states_of(parameter).items():
                if value is not None:
                    tensors[parameter.state_name(key)] = _convert(parameter, key, value)
        return tensors

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Return the optimizer's groups in order: the names of their parameters, and their options."""
        groups: dict[int, tuple[list[str], dict[str, Any]]] = {
            id(group): ([], group) for group in self.optimizer.param_groups
        }
        for parameter in self.places():
            groups.setdefault(id(parameter.group), ([], parameter.group))[0].append(parameter.name)
        return list(groups.values())

    def inventory(self) -> Inventory:
        """Return what this rank's module and optimizer are made of."""
        order = {name: index for index, name in enumerate(self.names.tensors)}
        states = [state for parameter in self.places() for state in self.states_of(parameter).items()]
        return Inventory(
            names=tuple(self.names.tensors),
            aliases=self.names.aliases,
            extra=self.names.extra,
            optimizer={
                "class": type(self.optimizer).__name__,
                "groups": [
                    {"parameters": sorted(names, key=lambda name: order[name]), "options": _options(group)}
                    for names, group in self.groups()
                ],
                "numbers": sorted({key for key, value in states if isinstance(value, (bool, int, float))}),
            },
            blocks=self.parts.blocks or (),
        )

    def all_names(self) -> set[str]:
        """Return the names of the whole model's tensors, and their further ones."""
        if self.whole is None:
            return {*self.names.tensors, *self.names.aliases}
        return {*self.whole.names, *self.whole.aliases}

    def describe(self) -> Inventory:
        """Return what a checkpoint says of the module and optimizer of all ranks, without groups of nothing."""
        whole = self.whole or self.inventory()
        groups = [group for group in whole.optimizer["groups"] if group["parameters"]]
        return replace(whole, optimizer={**whole.optimizer, "groups": groups})


class WholeStates(States):
    """States of the torch strategies: parameters are whole, or DTensors that know which part of the whole they are."""

    def places(self) -> Iterator[Place]:
        """Yield the parameters as they are."""
        names = self.names.of_parameters()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise CannotRun("checkpoint: the optimizer trains a parameter that the model's state_dict lacks")
                shape, split = self.shape_of(parameter), self.split_of(parameter)
                yield Place(name=names[parameter], group=group, tensor=parameter, shape=shape, split=split)

    def updated(self) -> None:
        """Do nothing: what was read in place is all there is."""


def _convert(parameter: Place, key: str, value: Any) -> Any:
    """Return the form in which a state is saved."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if not isinstance(value, torch.Tensor):
        raise CannotRun(
            f"checkpoint: the optimizer keeps a {type(value).__name__} ({key}) for {parameter.name}; only tensors and"
            " numbers can be saved"
        )
    if parameter.is_number(key, value.shape):
        return value.detach()
    if value.shape == parameter.tensor.shape:
        return parameter.saved(value.detach())
    if parameter.is_partial:
        is_piece = parameter.split is None
        remedy = "give it the attribute whole_tensors = True" if is_piece else "use adamw, or leave tp out"
        raise CannotRun(
            f"checkpoint: the optimizer keeps {key} {list(value.shape)} for a part of {parameter.name}, which fits no"
            f" other part; {remedy}"
        )
    return value.detach()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options that are JSON; a learning rate in a tensor becomes a number."""
    plain = {key: value.item() if _is_zero_dim(value) else value for key, value in group.items()}
    return {key: value for key, value in plain.items() if key not in ("params", "param_names") and is_json(value)}


def _is_zero_dim(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0
