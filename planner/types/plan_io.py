"""Plans in and out: the JSON object of the contract, and YAML files that hold the same object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from hardware_db.files import replace_text
from hardware_db.handed_in import quote, read_yaml
from planner import limits
from planner import vocabulary as words
from planner.errors import BrokenFile, ContradictoryRequest
from planner.models.facts import MlaFacts, ModelFacts, TowerFacts
from planner.types.plan import (
    SCHEMA_VERSION,
    ClusterSection,
    Configuration,
    MemoryEstimate,
    ModelSection,
    Plan,
    StepTime,
    Throughput,
    WorkloadSection,
)

Value = TypeVar("Value")

_PARTS: dict[str, type] = {
    "memory": MemoryEstimate,
    "time": StepTime,
    "throughput": Throughput,
}
_SECTIONS: dict[str, type] = {"model": ModelSection, "cluster": ClusterSection, "workload": WorkloadSection}
_REMEDY = "write it anew with `dsplan recommend --out DIR`"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the object that `estimate --json` prints and plan files hold."""
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
    """Return the plan a dict of the contract describes.

    Raises:
        BrokenFile: a key is missing, unknown or of the wrong type, or the schema is newer; `where` is named.
    """
    if not isinstance(raw, Mapping):
        raise BrokenFile(where, "this is not a plan", _REMEDY)
    version = raw.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BrokenFile(where, f"has plan schema {version}, this dsplan reads up to {SCHEMA_VERSION}", "update dsplan")
    if version != SCHEMA_VERSION:
        raise BrokenFile(where, f"has no plan schema_version {SCHEMA_VERSION}", _REMEDY)
    configuration = configuration_from_dict(raw.get("plan"), where)
    parts: dict[str, Any] = {name: _part(part, raw.get(name), f"{where}: {name}") for name, part in _PARTS.items()}
    sections: dict[str, Any] = {name: _section(name, raw.get(name), f"{where}: {name}") for name in _SECTIONS}
    _check_devices(sections["cluster"], configuration, f"{where}: cluster")
    for name, kind in (("verdict", "str"), ("limited_by", "str"), ("runnable", "bool")):
        if name not in raw:
            raise BrokenFile(where, f"lacks {name!r}", _REMEDY)
        _check_type(raw[name], kind, f"{where}: {name}")
    verdicts = get_args(words.Verdict)
    if raw["verdict"] not in verdicts:
        raise BrokenFile(where, f"has the verdict {quote(raw['verdict'])}, none of {', '.join(verdicts)}", _REMEDY)
    return Plan(
        configuration=configuration,
        **parts,
        **sections,
        provenance=_mapping(raw.get("provenance"), f"{where}: provenance"),
        verdict=raw["verdict"],
        limited_by=raw["limited_by"],
        runnable=raw["runnable"],
        notes=tuple(_texts(raw.get("notes", ()), f"{where}: notes")),
        alternatives=tuple(_alternatives(raw.get("alternatives", ()), f"{where}: alternatives")),
    )


def configuration_from_dict(raw: object, where: object = "plan") -> Configuration:
    """Return the configuration that the `plan` object of the contract describes.

    Raises:
        BrokenFile: a key is missing, unknown or of the wrong type.
    """
    configuration = _part(Configuration, raw, f"{where}: plan")
    if not limits.GPUS.allows(configuration.world_size) or not limits.SAMPLES.allows(configuration.global_batch_size):
        most = f"{limits.GPUS.most:,} ranks or {limits.SAMPLES.most:,} samples"
        raise BrokenFile(f"{where}: plan", f"is for more than {most}", _REMEDY)
    return configuration


def plan_text(plan: Plan) -> str:
    """Return the plan as YAML."""
    import yaml

    return str(yaml.safe_dump(plan_to_dict(plan), sort_keys=False, width=100))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as YAML, replacing the file in one step.

    Raises:
        BrokenFile: the file cannot be written.
    """
    replace_text(Path(path), plan_text(plan))


def load_plan(path: str | Path) -> Plan:
    """Return the plan in a YAML (or JSON) file.

    Raises:
        BrokenFile: the file cannot be read, is not YAML, or is not a plan this version understands.
    """
    return plan_from_dict(read_yaml(path, "give a plan that `dsplan recommend --out` wrote"), path)


def _part(part: type[Value], raw: object, where: str) -> Value:
    values = _mapping(raw, where)
    declared = {item.name: item for item in fields(part)}  # type: ignore[arg-type]
    for name in values:
        if name not in declared:
            raise BrokenFile(where, f"has an unknown key {quote(name)}", _REMEDY)
    for name, item in declared.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise BrokenFile(where, f"lacks {name!r}", _REMEDY)
        if name in values:
            _check_type(values[name], str(item.type), f"{where}.{name}")
    try:
        return part(**values)
    except ContradictoryRequest as problem:
        raise BrokenFile(where, str(problem), _REMEDY) from None


def _section(name: str, raw: object, where: str) -> dict[str, Any]:
    """Return what the plan says of its job; keys of a release that knew others stay as they are."""
    values = _mapping(raw, where)
    section: Any = _SECTIONS[name]
    for key in sorted(section.__required_keys__ - values.keys()):
        raise BrokenFile(where, f"lacks {key!r}", _REMEDY)
    for key, hint in section.__annotations__.items():
        if key in values and key not in ("facts", "groups"):
            _check_type(values[key], hint.__forward_arg__, f"{where}.{key}")
            _check_word(values[key], hint.__forward_arg__, f"{where}.{key}")
    if values.get("facts") is not None:
        _check_facts(_mapping(values["facts"], f"{where}.facts"), f"{where}.facts")
    return values


def _check_devices(cluster: Mapping[str, Any], configuration: Configuration, where: str) -> None:
    """Hold the devices of a plan's cluster against its degrees."""
    gpus, nodes, per_node = (cluster.get(name) for name in ("gpus", "nodes", "gpus_per_node"))
    if gpus != configuration.world_size:
        degrees = " x ".join(f"{name} {getattr(configuration, name)}" for name in _DEGREES)
        problem = f"is {gpus}, and the degrees of the plan ({degrees}) make {configuration.world_size} ranks"
        raise BrokenFile(f"{where}.gpus", problem, _REMEDY)
    for group in _groups(cluster, f"{where}.groups"):
        for key, kind in (("device", "str"), ("nodes", "Count"), ("gpus_per_node", "Count")):
            if key not in group:
                raise BrokenFile(f"{where}.groups", f"lacks {key!r}", _REMEDY)
            _check_type(group[key], kind, f"{where}.groups.{key}")
    if nodes and per_node and nodes * per_node != gpus:
        raise BrokenFile(f"{where}.gpus", f"is {gpus}, and nodes x gpus_per_node is {nodes} x {per_node}", _REMEDY)


def _groups(cluster: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    groups = cluster.get("groups", [])
    if not isinstance(groups, list):
        raise BrokenFile(where, f"is {quote(groups)}, not a list of groups of nodes", _REMEDY)
    return [_mapping(group, where) for group in groups]


_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def _check_facts(facts: Mapping[str, Any], where: str) -> None:
    """Hold the architecture of a plan against the limits of a `config.json`."""
    for name, value in facts.items():
        kind = _FACTS.get(name, "")
        if kind == "int" and not (value == 0 and type(value) is int):
            limit = limits.BYTES if name.endswith("parameters") else limits.model_figure(name)
            if not limit.allows(value):
                raise BrokenFile(f"{where}.{name}", f"is {quote(value)}, not {limit}", _REMEDY)
        elif kind.split(" ")[0] in ("bool", "float", "str") and "bool | str" not in kind:
            _check_type(value, kind, f"{where}.{name}")
        elif name in ("mla", "text", "vision") and value is not None:
            _check_facts(_mapping(value, f"{where}.{name}"), f"{where}.{name}")


_FACTS = {item.name: str(item.type) for part in (TowerFacts, MlaFacts, ModelFacts) for item in fields(part)}


def _texts(raw: object, where: str) -> list[str] | tuple[str, ...]:
    if not isinstance(raw, list | tuple) or not all(isinstance(text, str) for text in raw):
        raise BrokenFile(where, f"is {quote(raw)}, not a list of sentences", _REMEDY)
    return raw


def _alternatives(raw: object, where: str) -> list[Mapping[str, str]]:
    if not isinstance(raw, list | tuple):
        raise BrokenFile(where, f"is {quote(raw)}, not a list", _REMEDY)
    for item in raw:
        if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("strategy", "reason")):
            raise BrokenFile(where, f"holds {quote(item)}, not a strategy and a reason", _REMEDY)
    return list(raw)


def _check_type(value: object, annotation: str, where: str) -> None:
    """Hold a value against the annotation of its field: a number is finite and at least 0, a text is a text."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return
    if kind.startswith("Mapping"):
        for name, part in _mapping(value, where).items():
            _check_type(part, "float" if "float" in kind else "int", f"{where}.{name}")
        return
    if kind in _NUMBERS:
        wrong, wanted = not _NUMBERS[kind].allows(value), f"not {_NUMBERS[kind]}"
    elif kind == "bool":
        wrong, wanted = not isinstance(value, bool), "not true or false"
    else:
        wrong, wanted = not isinstance(value, str), "not text"
    if wrong:
        raise BrokenFile(where, f"is {quote(value)}, {wanted}", _REMEDY)


def _check_word(value: object, annotation: str, where: str) -> None:
    """Hold a text against the vocabulary that its annotation names, if it does."""
    vocabulary = annotation.removesuffix(" | None").removeprefix("words.")
    allowed = get_args(getattr(words, vocabulary, None))
    if allowed and value is not None and value not in allowed:
        raise BrokenFile(where, f"is {quote(value)}, not one of {', '.join(allowed)}", _REMEDY)


_NUMBERS = {"int": limits.BYTES, "float": limits.AMOUNT, "Count": limits.GPUS}


def _mapping(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise BrokenFile(where, "is missing or not a mapping", _REMEDY)
    return {str(name): value for name, value in raw.items()}
