"""Plans in and out: the JSON object of the contract, and YAML files that hold the same object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from hardware_db.files import replace_text
from planner.errors import BrokenFile, ContradictoryRequest
from planner.plan import SCHEMA_VERSION, Configuration, MemoryEstimate, Plan, StepTime, Throughput

Value = TypeVar("Value")

_PARTS: dict[str, type] = {
    "plan": Configuration,
    "memory": MemoryEstimate,
    "time": StepTime,
    "throughput": Throughput,
}
_MAPPINGS = ("model", "cluster", "workload", "provenance")
_REMEDY = "write it anew with `dsplan recommend --out DIR`"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The object that `estimate --json` prints and plan files hold."""
    configuration = asdict(plan.configuration)
    return {
        "schema_version": plan.schema_version,
        "model": dict(plan.model),
        "cluster": dict(plan.cluster),
        "workload": dict(plan.workload),
        "plan": configuration,
        "memory": asdict(plan.memory),
        "time": asdict(plan.time),
        "throughput": asdict(plan.throughput),
        "verdict": plan.verdict,
        "limited_by": plan.limited_by,
        "runnable": plan.runnable,
        "notes": list(plan.notes),
        "provenance": dict(plan.provenance),
        "alternatives": [dict(alternative) for alternative in plan.alternatives],
    }


def plan_from_dict(raw: object, where: object = "plan") -> Plan:
    """The plan a dict of the contract describes.

    Raises:
        BrokenFile: a key is missing, unknown or of the wrong type, or the schema is newer; `where` is named.
    """
    if not isinstance(raw, Mapping):
        raise BrokenFile(where, "is not a plan", _REMEDY)
    version = raw.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BrokenFile(where, f"has plan schema {version}, this dsplan reads up to {SCHEMA_VERSION}", "update dsplan")
    if version != SCHEMA_VERSION:
        raise BrokenFile(where, f"has no plan schema_version {SCHEMA_VERSION}", _REMEDY)
    parts: dict[str, Any] = {name: _part(part, raw.get(name), f"{where}: {name}") for name, part in _PARTS.items()}
    mappings: dict[str, Any] = {name: _mapping(raw.get(name), f"{where}: {name}") for name in _MAPPINGS}
    try:
        return Plan(
            configuration=parts.pop("plan"),
            **parts,
            **mappings,
            verdict=raw["verdict"],
            limited_by=str(raw["limited_by"]),
            runnable=bool(raw["runnable"]),
            notes=tuple(raw.get("notes", ())),
            alternatives=tuple(raw.get("alternatives", ())),
        )
    except KeyError as missing:
        raise BrokenFile(where, f"lacks {missing.args[0]!r}", _REMEDY) from None


def configuration_from_dict(raw: object, where: object = "plan") -> Configuration:
    """The configuration that the `plan` object of the contract describes.

    Raises:
        BrokenFile: a key is missing, unknown or of the wrong type.
    """
    return _part(Configuration, raw, f"{where}: plan")


def plan_text(plan: Plan) -> str:
    """The plan as YAML."""
    import yaml

    return str(yaml.safe_dump(plan_to_dict(plan), sort_keys=False, width=100))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as YAML, replacing the file in one step.

    Raises:
        BrokenFile: the file cannot be written.
    """
    replace_text(Path(path), plan_text(plan))


def load_plan(path: str | Path) -> Plan:
    """The plan in a YAML (or JSON) file.

    Raises:
        BrokenFile: the file cannot be read, is not YAML, or is not a plan this version understands.
    """
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not text"
        raise BrokenFile(
            path, f"cannot be read ({reason})", "give a plan that `dsplan recommend --out` wrote"
        ) from None
    except yaml.YAMLError as problem:
        line = getattr(getattr(problem, "problem_mark", None), "line", None)
        place = "" if line is None else f" at line {line + 1}"
        raise BrokenFile(path, f"is not YAML{place}", _REMEDY) from None
    return plan_from_dict(raw, path)


def _part(part: type[Value], raw: object, where: str) -> Value:
    values = _mapping(raw, where)
    known = {item.name: item for item in fields(part)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise BrokenFile(where, f"has an unknown key {name!r}", _REMEDY)
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise BrokenFile(where, f"lacks {name!r}", _REMEDY)
        if name in values:
            _check_type(values[name], str(item.type), f"{where}.{name}")
    try:
        return part(**values)
    except ContradictoryRequest as problem:
        raise BrokenFile(where, str(problem), _REMEDY) from None


def _check_type(value: object, annotation: str, where: str) -> None:
    if annotation == "bool" and not isinstance(value, bool):
        raise BrokenFile(where, f"is {value!r}, not true or false", _REMEDY)
    if value is None and annotation.endswith("| None"):
        return
    if annotation.removesuffix(" | None") in ("int", "float") and (
        isinstance(value, bool) or not isinstance(value, int | float)
    ):
        raise BrokenFile(where, f"is {value!r}, not a number", _REMEDY)


def _mapping(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise BrokenFile(where, "is missing or not a mapping", _REMEDY)
    return {str(name): value for name, value in raw.items()}
