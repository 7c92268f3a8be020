"""Restore: where the tensors of a checkpoint go in a live engine, which may be of another strategy and size."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from strategies.checkpoint.content import Content
from strategies.checkpoint.names import load_extra
from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.states import IMPLEMENTATION, MODEL, OPTIMIZER, Place, States
from strategies.errors import BrokenFile

Saved = Mapping[str, TensorStorageMetadata]
_SAME_STATES = (
    {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"},
    {"Lion", "FusedLion", "DeepSpeedCPULion"},
    {"Adagrad", "DeepSpeedCPUAdagrad"},
)


class Restore:
    """One reading of one checkpoint into one engine: `room` says what is read, `finish` takes it over."""

    def __init__(self, path: Path, content: Content, states: States) -> None:
        self._path, self._content, self._states = path, content, states
        self._numbers = frozenset(content.optimizer.get("numbers", ()))

    def room(self, saved: Saved) -> dict[str, Any]:
        """Where each tensor is read to: weights in place, optimizer states to what becomes the optimizer's.

        Raises:
            BrokenFile: the checkpoint is of another model, or of another optimizer.
        """
        self._require_optimizer()
        target = self._states.weights()
        self._require_model(target, saved)
        by_parameter = _states_by_parameter(saved)
        for place in self._states.places():
            if place.is_absent:
                continue
            for key, name in by_parameter.get(place.name, {}).items():
                target |= self._state_room(place, key, name, saved[name])
        return target

    def finish(self, values: Mapping[str, Any]) -> None:
        """Take over what was read, the options of groups, and what modules keep beside tensors."""
        by_parameter = _states_by_parameter(values)
        for place in self._states.places():
            if not place.is_absent:
                found = by_parameter.get(place.name, {})
                old = dict(self._states.states_of(place))
                new = {key: self._formed(place, key, values[name], old.get(key)) for key, name in found.items()}
                self._states.keep(place, new)
        self._restore_options()
        load_extra(self._states.module, self._content.extra)
        self._states.updated()

    def _state_room(self, place: Place, key: str, name: str, saved: TensorStorageMetadata) -> dict[str, Any]:
        dtype = saved.properties.dtype
        if self._is_number(place, key, saved.size):
            return {name: torch.empty((), dtype=dtype)}
        if saved.size == place.shape:
            return {name: place.saved(self._states.room_for(place, key, dtype))}
        if place.is_partial:
            problem = f"has {key} {list(saved.size)} for all of {place.name}"
            raise self._broken(problem, "resume on one rank, or under ddp")
        return {name: torch.empty(saved.size, dtype=dtype, device=place.tensor.device)}

    def _is_number(self, place: Place, key: str, shape: torch.Size) -> bool:
        return place.is_number(key, shape) or key in self._numbers

    def _formed(self, place: Place, key: str, value: Any, old: Any) -> Any:
        """A state as this optimizer keeps it: numbers as it does, tensors where its implementation wants them."""
        if isinstance(value, PartOfTensor):
            return value.run
        if not isinstance(value, torch.Tensor) or not self._is_number(place, key, value.shape):
            return value
        if isinstance(old, torch.Tensor):
            return value.to(old)
        if isinstance(old, (bool, int, float)):
            return type(old)(value.item())
        library = type(self._states.optimizer).__module__.partition(".")[0]
        if library == "deepspeed":
            return int(value.item())
        if library == "torch":
            on_device = place.group.get("capturable") or place.group.get("fused")
            return value.to(place.tensor.device if on_device else "cpu", torch.float32)
        return value.item() if key in self._numbers else value

    def _restore_options(self) -> None:
        groups = self._content.optimizer.get("groups", ())
        saved: dict[str, dict[str, Any]] = {name: one["options"] for one in groups for name in one["parameters"]}
        for names, group in self._states.groups():
            options = next((saved[name] for name in names if name in saved), dict[str, Any]())
            for key, value in options.items():
                if key in group and key not in IMPLEMENTATION:
                    group[key] = _like(group[key], value)

    def _require_optimizer(self) -> None:
        before, now = self._content.optimizer.get("class", ""), type(self._states.optimizer).__name__
        if before != now and not any({before, now} <= same for same in _SAME_STATES):
            raise self._broken(f"was trained with optimizer {before}, not {now}", f"resume with {before}")

    def _require_model(self, target: Iterable[str], saved: Saved) -> None:
        """Every weight of the model is there in its shape, and no other."""
        tensors = self._states.names.tensors
        live = {name: self._states.shape_of(tensors[name]) for name in (one.removeprefix(MODEL) for one in target)}
        there = {name.removeprefix(MODEL): one.size for name, one in saved.items() if name.startswith(MODEL)}
        for name, shape in live.items():
            if name not in there:
                near = difflib.get_close_matches(name, there, n=1)
                raise self._broken(f"has no weight {name}{f' (nearest: {near[0]})' if near else ''}", _SAME_MODEL)
            if there[name] != shape:
                raise self._broken(f"has {name} as {list(there[name])} and the model as {list(shape)}", _SAME_MODEL)
        known = {*live, *self._states.names.aliases, *self._content.aliases}
        for name in there:
            if name not in known:
                raise self._broken(f"has a weight {name} that the model has not", _SAME_MODEL)

    def _broken(self, problem: str, remedy: str) -> BrokenFile:
        return BrokenFile(self._path, problem, remedy)


_SAME_MODEL = "build the model that was saved, or name another checkpoint"


def _states_by_parameter(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of optimizer states by parameter and by state."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith(OPTIMIZER):
            _, key, parameter = name.split("/", 2)
            found.setdefault(parameter, {})[key] = name
    return found


def _like(live: Any, value: Any) -> Any:
    """A saved option in the form in which the live group has it."""
    if isinstance(live, torch.Tensor):
        return live.fill_(value)
    return tuple(value) if isinstance(live, tuple) else value
