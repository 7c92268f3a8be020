"""Benchmark plans as YAML files, written to be read and changed by people. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text
from hardware_db.handed_in import read_yaml
from hardware_db.microbench.grid import unmeasurable
from hardware_db.microbench.point import Point
from planner.errors import ContradictoryRequest
from planner.plan import Configuration
from planner.vocabulary import TASKS
from strategies.bench.case import TrainingCase
from strategies.bench.plan import BenchPlan

SCHEMA_VERSION = 1
_REMEDY = "write it anew with `dsplan bench --generate FILE`"

Value = TypeVar("Value")


def save_bench_plan(plan: BenchPlan, path: Path) -> None:
    """Write the plan as YAML, replacing the file in one step.

    Raises:
        BrokenFile: the file cannot be written.
    """
    import yaml

    document = {
        "schema_version": SCHEMA_VERSION,
        "device": plan.device,
        "model": plan.model,
        "points": [_without_defaults(point) for point in plan.points],
        "training": [
            {
                "model": case.model,
                "task": case.task,
                "config": dict(case.config),
                "plan": _without_defaults(case.configuration),
            }
            for case in plan.training
        ],
    }
    replace_text(path, yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None))


def load_bench_plan(path: Path) -> BenchPlan:
    """The plan in a YAML file.

    Raises:
        BrokenFile: the file cannot be read, or is no benchmark plan that this version understands; the place is named.
    """
    raw = _read(path)
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BrokenFile(path, f"has schema_version {version!r}, this dsplan reads {SCHEMA_VERSION}", _REMEDY)
    known = ("schema_version", "device", "model", "points", "training")
    unknown = next((name for name in raw if name not in known), None)
    if unknown is not None:
        raise BrokenFile(path, f"has an unknown key {unknown!r}; the keys are {', '.join(known)}", _REMEDY)
    return BenchPlan(
        device=_text(raw.get("device"), f"{path}: device"),
        model=str(raw.get("model") or ""),
        points=_each(raw.get("points"), f"{path}: points", _point),
        training=_each(raw.get("training"), f"{path}: training", _case),
    )


def _read(path: Path) -> Mapping[str, Any]:
    raw = read_yaml(path, _REMEDY)
    if not isinstance(raw, Mapping):
        raise BrokenFile(path, "is not a benchmark plan", _REMEDY)
    return raw


def _each(raw: object, where: str, read: Callable[[Mapping[str, Any], str], Value]) -> tuple[Value, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(item, Mapping) for item in raw):
        raise BrokenFile(where, "is not a list of mappings", _REMEDY)
    return tuple(read(item, f"{where}, item {number}") for number, item in enumerate(raw, start=1))


def _point(raw: Mapping[str, Any], where: str) -> Point:
    values = _checked(Point, raw, where)
    shape = values.get("shape", ())
    if not isinstance(shape, list | tuple) or not all(type(extent) is int and extent > 0 for extent in shape):
        raise BrokenFile(where, f"has shape {shape!r}; it must be whole numbers above 0", _REMEDY)
    for name, least in (("size", 0), ("ranks", 1)):
        if name in values and (type(values[name]) is not int or values[name] < least):
            raise BrokenFile(where, f"has {name} {values[name]!r}; it must be a whole number from {least}", _REMEDY)
    point = Point(**{**values, "shape": tuple(shape)})
    problem = unmeasurable(point)
    if problem:
        raise BrokenFile(where, problem, _REMEDY)
    return point


def _case(raw: Mapping[str, Any], where: str) -> TrainingCase:
    values = _checked(TrainingCase, {**raw, "configuration": raw.get("plan")}, where, ignored=("plan",))
    chosen, config = values.pop("configuration"), values.pop("config", None) or {}
    if not isinstance(chosen, Mapping):
        raise BrokenFile(where, "lacks 'plan'", _REMEDY)
    if not isinstance(config, Mapping) or values["task"] not in TASKS:
        raise BrokenFile(where, f"needs a task ({', '.join(TASKS)}) and a config of keys and values", _REMEDY)
    try:
        configuration = Configuration(**_checked(Configuration, chosen, f"{where}: plan"))
    except ContradictoryRequest as problem:
        raise BrokenFile(f"{where}: plan", str(problem), _REMEDY) from None
    return TrainingCase(model=str(values["model"]), task=values["task"], config=config, configuration=configuration)


def _checked(kind: type, raw: Mapping[str, Any], where: str, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entries of `raw` that are fields of `kind`; every other one, and every one that lacks, is an error."""
    known = {item.name: item for item in fields(kind)}
    for name in raw:
        if name not in known and name not in ignored:
            raise BrokenFile(where, f"has an unknown key {name!r}", _REMEDY)
    for name, item in known.items():
        if name not in raw and item.default is MISSING and item.default_factory is MISSING:
            raise BrokenFile(where, f"lacks {name!r}", _REMEDY)
    return {name: value for name, value in raw.items() if name in known}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise BrokenFile(where, "is missing", _REMEDY)
    return value


def _without_defaults(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that say something."""
    defaults = {item.name: item.default for item in fields(value)}
    entries = {name: entry for name, entry in asdict(value).items() if entry != defaults[name]}
    return {name: list(entry) if isinstance(entry, tuple) else entry for name, entry in entries.items()}
