"""Manifests that hold a training's command: SkyPilot's tasks and Kubernetes' jobs, with the GPUs that they ask for.

Of skypilot-org/skypilot's YAML `resources.accelerators`, `num_nodes` and `run`; of Kubernetes Pod, Job and JobSet, and
Kubeflow's PyTorchJob (`pytorchReplicaSpecs`) and TrainJob (`spec.trainer`): whatever kind has containers or a trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware_db.records import dataclass
from planner.read.form import Setting, Source

_SEPARATOR = re.compile(r"^---[ \t]*(#.*)?$", re.MULTILINE)
_CONTAINER = re.compile(r"(.*containers\.\d+|spec\.trainer)\.(command|args)")
_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A manifest's command as a script, and how many nodes and GPUs it asks for, None where it does not say."""

    script: Source
    gpus: int | None
    nodes: int


def only_document(source: Source) -> Source:
    """Return a manifest of several documents with only the one that runs something, its lines where they were."""
    text = source.text
    if not (re.search(r"^apiVersion:", text, re.MULTILINE) and _SEPARATOR.search(text)):
        return source
    ends = [*(match.start() for match in _SEPARATOR.finditer(text)), len(text)]
    begins = [0, *(match.end() for match in _SEPARATOR.finditer(text))]
    runs = re.compile(r"^\s*(- )?(command|args):", re.MULTILINE)
    for begin, end in zip(begins, ends, strict=True):
        if runs.search(text, begin, end):
            before = re.sub(r"[^\n]", " ", text[:begin])
            return replace(source, text=before + text[begin:end])
    return source


def task_of(source: Source, settings: Sequence[Setting]) -> Task | None:
    """Return the command of a manifest; None of any other config."""
    values = {item.key: item.value for item in settings}
    if "run" in values and {"num_nodes", "resources.accelerators"} & values.keys():
        return _of_skypilot(source, values)
    if {"apiVersion", "kind"} <= values.keys():
        return _of_kubernetes(source, values)
    return None


def _of_skypilot(source: Source, values: Mapping[str, Any]) -> Task:
    cards = re.fullmatch(r"[\w-]+\s*:\s*([0-9]+)", str(values.get("resources.accelerators", "")))
    nodes = _count(values.get("num_nodes")) or 1
    script = replace(source, path=f"{source.path} (run)", text=str(values["run"]), is_file=False)
    return Task(script=script, gpus=int(cards[1]) * nodes if cards else None, nodes=nodes)


def _of_kubernetes(source: Source, values: Mapping[str, Any]) -> Task | None:
    for key in values:
        if (match := _CONTAINER.fullmatch(key)) is None:
            continue
        prefix = match[1]
        words = [*_list(values.get(f"{prefix}.command")), *_list(values.get(f"{prefix}.args"))]
        if not words:
            continue
        nodes = _nodes(values, prefix)
        per_node = _count(values.get("spec.trainer.numProcPerNode")) if prefix == "spec.trainer" else None
        for kind in ("limits", "requests"):
            for name in ("nvidia.com/gpu", "amd.com/gpu"):
                per_node = per_node or _count(values.get(f"{prefix}.resources.{kind}.{name}"))
                per_node = per_node or _count(values.get(f"{prefix}.resourcesPerNode.{kind}.{name}"))
        text = "\n".join([*_variables(values, prefix), _command(words)])
        script = replace(source, path=f"{source.path} (command)", text=text, is_file=False)
        return Task(script=script, gpus=None if per_node is None else per_node * nodes, nodes=nodes)
    return None


def _command(words: list[str]) -> str:
    """Return the words of a container as a script; what a shell is given is one already."""
    flags = next((position for position, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), None)
    if words[0] in _SHELLS and flags is not None and flags + 1 < len(words):
        return words[flags + 1]
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def _variables(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Return a container's variables as a shell would set them."""
    lines = []
    for key, name in values.items():
        match = re.fullmatch(rf"{re.escape(prefix)}\.env\.(\d+)\.name", key)
        value = values.get(f"{prefix}.env.{match[1]}.value") if match else None
        if value is not None and re.fullmatch(r"[A-Za-z_]\w*", str(name)):
            lines.append(f"export {name}='" + str(value).replace("'", "'\\''") + "'")
    return lines


def _nodes(values: Mapping[str, Any], prefix: str) -> int:
    """Return how many pods a job starts: the replicas of all roles, or those of the one job."""
    if prefix == "spec.trainer":
        return _count(values.get("spec.trainer.numNodes")) or 1
    roles = {match[1] for key in values if (match := re.match(r"(spec\.pytorchReplicaSpecs\.\w+)\.", key))}
    if roles:
        return sum(_count(values.get(f"{role}.replicas")) or 1 for role in roles)
    count = 1
    for key, value in values.items():
        parent, _, name = key.rpartition(".")
        if name in ("replicas", "parallelism") and prefix.startswith(f"{parent}."):
            count *= _count(value) or 1
    return count


def _list(value: Any) -> list[str]:
    return [] if value is None else [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _count(value: Any) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0 else None
