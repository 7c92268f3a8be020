"""Restore the tensors of a checkpoint into a live engine, which may be of another strategy and size."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from strategies.checkpoint.content import STATE, Content, is_number
from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.reading import Damaged, shown
from strategies.checkpoint.states import IMPLEMENTATION, MODEL, OPTIMIZER, SCALARS, Place, States
from strategies.errors import BrokenFile

Saved = Mapping[str, TensorStorageMetadata]
_PER_GROUP = frozenset({"base_lrs", "_last_lr", "starting"})
"""What torch's schedulers and ours keep for each parameter group."""
_GONE = frozenset({"verbose"})
"""What schedulers of an older torch kept."""
_SAME_STATES: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"}), frozenset({"exp_avg", "exp_avg_sq"})),
    (frozenset({"Lion", "FusedLion", "DeepSpeedCPULion"}), frozenset({"exp_avg"})),
    (frozenset({"Adagrad", "DeepSpeedCPUAdagrad"}), frozenset()),
)
"""Optimizers that resume from each other's states, and the states in a parameter's shape that all of them need."""


class Restore:
    """One reading of one checkpoint into one engine.

    `check` compares both, `numbers_room` and `room` say what is read, `finish` takes it over. The engine changes in
    `room` at the earliest.
    """

    def __init__(self, path: Path, content: Content, states: States, saved: Saved) -> None:
        self._path, self._content, self._states, self._saved = path, content, states, saved
        self._numbers = frozenset(content.optimizer.get("numbers", ()))
        self._by_parameter = _states_by_parameter(saved)
        self._weights: dict[str, Any] = {}
        self._options: list[tuple[dict[str, Any], str, Any]] = []

    def check(self) -> None:
        """Compare both, and raise `BrokenFile` for another model, another optimizer, or what neither can be."""
        needed = self._require_optimizer()
        self._weights = self._states.weights()
        self._require_model()
        for parameter in self._parameters():
            states = self._by_parameter.get(parameter.name, {})
            missing = sorted(needed - states.keys()) if states else []
            if missing:
                raise self._broken(f"has no {missing[0]} of {parameter.name}", "name another checkpoint")
            for key, name in states.items():
                self._require_state(parameter, key, self._saved[name], is_needed=key in needed)
        self._options = self._check_options()

    def _saved_states(self) -> Iterator[tuple[Place, str, str]]:
        """Yield each parameter here with the keys and the names of its states in the checkpoint."""
        for parameter in self._parameters():
            for key, name in self._by_parameter.get(parameter.name, {}).items():
                yield parameter, key, name

    def numbers_room(self) -> dict[str, torch.Tensor]:
        """Make room for the states that are one number for a parameter."""
        return {
            name: torch.empty((), dtype=self._saved[name].properties.dtype)
            for parameter, key, name in self._saved_states()
            if self._is_number(parameter, key, self._saved[name].size)
        }

    def check_numbers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Raise `BrokenFile` for a state that is a number which its optimizer cannot have."""
        for parameter, key, name in self._saved_states():
            if name not in values:
                continue
            number = values[name].item()
            is_counted = key != "step" or (isinstance(number, (int, float)) and 0 <= number < 2**53)
            try:
                is_one = key not in SCALARS or (math.isfinite(number) and is_counted)
                self._convert(parameter, key, values[name], self._states.states_of(parameter).get(key))
            except (ValueError, OverflowError, TypeError, RuntimeError):
                is_one = False
            if not is_one:
                raise self._broken(f"has {key} {number} of {parameter.name}", "name another checkpoint")

    def room(self) -> dict[str, Any]:
        """Make room for all other tensors: weights in place, optimizer states in what becomes the optimizer's."""
        target = self._weights
        for parameter, key, name in self._saved_states():
            if not self._is_number(parameter, key, self._saved[name].size):
                target |= self._state_room(parameter, key, name, self._saved[name])
        return target

    def finish(self, values: Mapping[str, Any]) -> None:
        """Take over what was read, and the options of groups."""
        by_parameter = _states_by_parameter(values)
        for parameter in self._parameters():
            old, names = dict(self._states.states_of(parameter)), by_parameter.get(parameter.name, {})
            new = {key: self._convert(parameter, key, values[name], old.get(key)) for key, name in names.items()}
            self._states.keep(parameter, new)
        for group, key, value in self._options:
            live = group[key]
            group[key] = live.fill_(value) if isinstance(live, torch.Tensor) else value
        self._states.updated()

    def _parameters(self) -> Iterator[Place]:
        return (parameter for parameter in self._states.places() if not parameter.is_absent)

    def _state_room(self, parameter: Place, key: str, name: str, saved: TensorStorageMetadata) -> dict[str, Any]:
        dtype = saved.properties.dtype
        if saved.size == parameter.shape:
            return {name: parameter.saved(self._states.room_for(parameter, key, dtype))}
        return {name: torch.empty(saved.size, dtype=dtype, device=parameter.tensor.device)}

    def _require_state(self, parameter: Place, key: str, saved: TensorStorageMetadata, *, is_needed: bool) -> None:
        shape, is_shaped, live = list(saved.size), is_needed and key not in SCALARS, parameter.tensor.dtype
        if is_shaped and (saved.size != parameter.shape or not _same_kind(saved.properties.dtype, live)):
            problem = f"has {key} of {parameter.name} as {saved.properties.dtype} {shape}"
            raise self._broken(f"{problem}, and the parameter is {live} {list(parameter.shape)}", _SAME_MODEL)
        if shape and (key in self._numbers or (is_needed and key in SCALARS)):
            problem = f"has {key} of {parameter.name} as {shape}, which is no number"
            raise self._broken(problem, "name another checkpoint")
        if parameter.is_partial and saved.size != parameter.shape and not self._is_number(parameter, key, saved.size):
            raise self._broken(f"has {key} {shape} for all of {parameter.name}", "resume on one rank, or under ddp")

    def _is_number(self, parameter: Place, key: str, shape: torch.Size) -> bool:
        return parameter.is_number(key, shape) or key in self._numbers

    def _convert(self, parameter: Place, key: str, value: Any, old: Any) -> Any:
        """Return a state as this optimizer keeps it: numbers as it does, tensors where it wants them."""
        if isinstance(value, PartOfTensor):
            return value.tensor
        if not isinstance(value, torch.Tensor) or not self._is_number(parameter, key, value.shape):
            return value
        if isinstance(old, torch.Tensor):
            return value.to(old)
        if isinstance(old, (bool, int, float)):
            return type(old)(value.item())
        library = type(self._states.optimizer).__module__.partition(".")[0]
        if library == "deepspeed":
            return int(value.item())
        if library == "torch":
            on_device = parameter.group.get("capturable") or parameter.group.get("fused")
            return value.to(parameter.tensor.device if on_device else "cpu", torch.float32)
        return value.item() if key in self._numbers else value

    def _check_options(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the options of every live group that the checkpoint has, in the form in which the group has them."""
        groups = self._content.optimizer.get("groups", ())
        saved: dict[str, dict[str, Any]] = {name: group["options"] for group in groups for name in group["parameters"]}
        options = []
        for names, group in self._states.groups():
            for key, value in next((saved[name] for name in names if name in saved), dict[str, Any]()).items():
                if key in group and key not in IMPLEMENTATION:
                    try:
                        options.append((group, key, as_live(group[key], value)))
                    except ValueError as problem:
                        raise Damaged(self._path / STATE, f"its optimizer's {shown(key)} {problem}") from None
        return options

    def _require_optimizer(self) -> frozenset[str]:
        """Return the states that every parameter of this optimizer has, if it has any."""
        before, now = self._content.optimizer.get("class", ""), type(self._states.optimizer).__name__
        same = next((needed for names, needed in _SAME_STATES if {before, now} <= names), None)
        if before != now and same is None:
            raise self._broken(f"was trained with optimizer {before}, not {now}", f"resume with {before}")
        needed = same or frozenset()
        is_torchs_adam = "exp_avg_sq" in needed and type(self._states.optimizer).__module__.startswith("torch.")
        return needed | {"step"} if is_torchs_adam else needed

    def _require_model(self) -> None:
        """Require every weight of the model in its shape, and no other; no states of other weights either."""
        tensors, saved = self._states.names.tensors, self._saved
        live = {
            name: self._states.shape_of(tensors[name])
            for name in (weight.removeprefix(MODEL) for weight in self._weights)
        }
        there = {name.removeprefix(MODEL): tensor for name, tensor in saved.items() if name.startswith(MODEL)}
        for name, shape in live.items():
            if name not in there:
                if self._content.left_out and not tensors[name].requires_grad:
                    del self._weights[f"{MODEL}{name}"]
                    continue
                near = difflib.get_close_matches(name, there, n=1)
                raise self._broken(f"has no weight {name}{f' (nearest: {near[0]})' if near else ''}", _SAME_MODEL)
            if there[name].size != shape:
                problem = f"has {name} as {list(there[name].size)} and the model as {list(shape)}"
                raise self._broken(problem, _SAME_MODEL)
            if not _same_kind(there[name].properties.dtype, tensors[name].dtype):
                problem = f"has {name} as {there[name].properties.dtype} and the model as {tensors[name].dtype}"
                raise self._broken(problem, _SAME_MODEL)
        names = {*live, *self._states.all_names(), *self._content.aliases}
        for name in there:
            if name not in names:
                raise self._broken(f"has a weight {shown(name)[1:-1]} that the model has not", _SAME_MODEL)
        for name, states in self._by_parameter.items():
            if name not in names:
                raise self._broken(f"has {shown(next(iter(states.values())))} and no such weight", _SAME_MODEL)

    def _broken(self, problem: str, remedy: str) -> BrokenFile:
        return BrokenFile(self._path, problem, remedy)


_SAME_MODEL = "build the model that was saved, or name another checkpoint"


def _states_by_parameter(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of optimizer states by parameter and by state."""
    states: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith(OPTIMIZER):
            _, key, parameter = name.split("/", 2)
            states.setdefault(parameter, {})[key] = name
    return states


def as_live(live: Any, value: Any) -> Any:
    """Return a value of JSON in the form of the one that it replaces, with its tuples and its whole numbers as keys.

    Raises:
        ValueError: it is of another kind.
    """
    if value is None or live is None:
        return value
    if isinstance(live, Mapping):
        return _like_mapping(live, value)
    if isinstance(live, (list, tuple)):
        return _like_list(live, value)
    is_alike = (
        is_number(value) if _is_numeric(live) else type(value) is type(live) if isinstance(live, (bool, str)) else True
    )
    if not is_alike:
        raise ValueError(f"is {shown(value)}, and was {shown(live)}")
    return value


def _like_mapping(live: Mapping[Any, Any], value: Any) -> Any:
    """Convert a mapping: names with an underscore come and go with versions of torch; others have to be the same."""
    if not isinstance(value, dict):
        raise ValueError(f"is {shown(value)}, which has no names")
    if not live:
        return value
    by_text = {str(key): key for key in live}
    if all(isinstance(key, int) for key in live):
        return type(live)({int(key): entry for key, entry in value.items()})  # type: ignore[call-arg]
    public = [{key for key in keys if not key.startswith("_")} - _GONE for keys in (value, by_text)]
    if public[0] != public[1]:
        raise ValueError(f"has {shown(min(public[0] ^ public[1]))} on one side alone")
    entries = {}
    for key, entry in value.items():
        if key in by_text:
            try:
                entries[key] = as_live(live[key], entry)
                if key in _PER_GROUP and len(live[key]) != len(entries[key]):
                    raise ValueError(f"has {len(entry)} members, and not {len(live[key])}")
            except (ValueError, TypeError) as problem:
                raise ValueError(f"{shown(key)} {problem}") from None
    return entries


def _like_list(live: Any, value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, which is no list")
    if live and all(map(_is_numeric, live)):
        value = [as_live(live[0], entry) for entry in value]
    if isinstance(live, tuple) or any(isinstance(entry, Mapping) for entry in live):
        if len(live) != len(value):
            raise ValueError(f"has {len(value)} members, and not {len(live)}")
        value = [as_live(own, entry) for own, entry in zip(live, value, strict=True)]
    return tuple(value) if isinstance(live, tuple) else value


def _is_numeric(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_tensor or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _same_kind(one: torch.dtype, two: torch.dtype) -> bool:
    return (one.is_floating_point, one.is_complex) == (two.is_floating_point, two.is_complex)
