"""The plan that `dsplan run` is asked for, handed to the ranks as one environment variable. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from hardware_db.from_json import from_json
from hardware_db.probe.machine import Gpu
from planner import vocabulary as words
from strategies.variables import REQUEST

_EARLIER = {
    "plan_file": "DSPLAN_PLAN",
    "strategy": "DSPLAN_STRATEGY",
    "backend": "DSPLAN_BACKEND",
    "degrees": "DSPLAN_PARALLEL",
    "method": "DSPLAN_METHOD",
    "kernels": "DSPLAN_KERNELS",
}
"""A variable for each field, as earlier releases have them in the `launch.json` of their runs; the last three JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedDegrees:
    """Degrees to plan for, with the words of `initialize(parallel=)`; None is left open."""

    shard: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    pp_schedule: words.Schedule | None = None
    virtual_stages: int | None = None
    sequence_parallel: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedMethod:
    """The kind of training; None is left open."""

    method: words.Method | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    train_only: str | None = None


ON_CPU = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
"""Variables without which accelerate leaves every CPU rank alone with its own copy, and DeepSpeed looks for a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecidedDevice:
    """The device of the ranks of a node, as `dsplan run` has decided it there."""

    gpus: int
    """That torch has to see; 0: the ranks train on the CPU."""
    name: str = ""
    """Of the first of them."""
    unlisted: tuple[Gpu, ...] = ()
    """Those that no driver's library lists here, as torch sees them."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `from_json` reads."""
        gpus = [{name: value for name, value in asdict(gpu).items() if value is not None} for gpu in self.unlisted]
        return {"gpus": self.gpus, "name": self.name, **({"unlisted": gpus} if gpus else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The flags of the plan; None, or nothing, is left to the planner, or to the script."""

    plan_file: str | None = None
    """Of the plan to follow, absolute."""
    strategy: str | None = None
    backend: str | None = None
    rates: str | None = None
    """Of ranks in order, one beside the other: `3x1,1x0.5`."""
    degrees: RequestedDegrees = field(default_factory=RequestedDegrees)
    method: RequestedMethod = field(default_factory=RequestedMethod)
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Providers by kernel; `all` is every kernel."""
    device: DecidedDevice | None = None
    """What no flag says: the device of this node's ranks. None where they decide, as those of other nodes do."""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> PlanRequest:
        """Return the request in a process's, or a launch's, environment variables; an open one where there is none."""
        if text := variables.get(REQUEST):
            return _parse(text)
        earlier = {name: variables[variable] for name, variable in _EARLIER.items() if variables.get(variable)}
        return _parse(
            json.dumps({name: text if name in _TEXTS else json.loads(text) for name, text in earlier.items()})
        )

    def to_variables(self) -> dict[str, str]:
        """Return the variables that `of` reads; none where everything is left open."""
        flat = {name: getattr(self, name) for name in (*_TEXTS, "kernels")}
        parts = {**flat, "degrees": named(self.degrees), "method": named(self.method)}
        parts["device"] = self.device and self.device.to_json()
        requested = {name: value for name, value in parts.items() if value}
        return {REQUEST: json.dumps(requested)} if requested else {}


_TEXTS = ("plan_file", "strategy", "backend", "rates")


@cache
def _parse(text: str) -> PlanRequest:
    return from_json(PlanRequest, json.loads(text))


def plan_request() -> PlanRequest:
    """Return what was asked of the plan of this process."""
    return PlanRequest.of(os.environ)


def named(flags: object) -> dict[str, Any]:
    """Return the fields of a request's part that are not left open, by name."""
    values = ((item.name, getattr(flags, item.name)) for item in fields(flags))  # type: ignore[arg-type]
    return {name: value for name, value in values if value is not None}
