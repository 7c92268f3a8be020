"""Probes of the private names that `strategies/torch_compat/entries.yaml` lists, on the installed torch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import strategies.torch_compat
from hardware_db.files import read_shipped_yaml

LISTED: Mapping[str, Any] = read_shipped_yaml(Path(strategies.torch_compat.__file__).with_name("entries.yaml"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One private name of torch; the YAML file has the words."""

    module: str
    name: str
    takes: tuple[str, ...] | None = None
    since: str | None = None
    until: str | None = None
    instances: bool = False

    @property
    def path(self) -> str:
        """The name that a failure is reported by."""
        return f"{self.module}.{self.name}"


def _read() -> Iterator[Entry]:
    for group in LISTED["private"]:
        for text in group["names"]:
            name, bracket, parameters = text.rstrip(")").partition("(")
            takes = tuple(parameters.split(", ")) if parameters else () if bracket else None
            yield Entry(name=name, takes=takes, **{key: value for key, value in group.items() if key != "names"})


ENTRIES = tuple(_read())
OPERATIONS: Mapping[str, str | None] = LISTED["operations"]


def problems() -> list[str]:
    """Return what does not hold on the installed torch, a line for each entry."""
    installed = _numbers(torch.__version__)
    lines = [
        f"{entry.path}: {problem}"
        for entry in ENTRIES
        if entry.since is None or _numbers(entry.since) <= installed
        if entry.until is None or installed <= _numbers(entry.until)
        if (problem := _problem(entry)) is not None
    ]
    for name, since in OPERATIONS.items():
        namespace, _, operation = name.partition(".")
        if (since is None or _numbers(since) <= installed) and not hasattr(getattr(torch.ops, namespace), operation):
            lines.append(f"torch.ops.{name}: there is no such operation")
    return [f"torch {torch.__version__}: {line}" for line in lines]


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _problem(entry: Entry) -> str | None:
    try:
        value: Any = import_module(entry.module)
    except ImportError as problem:
        return str(problem)
    *owners, last = entry.name.split(".")
    for owner in owners:
        if not hasattr(value, owner):
            return f"there is no {owner}"
        value = getattr(value, owner)
    if entry.instances:
        return None if last in _assigned(value) or hasattr(value, last) else f"{value.__name__} assigns no {last}"
    if not hasattr(value, last):
        return "it is not there"
    return None if entry.takes is None else _mismatch(getattr(value, last), entry.takes)


def _mismatch(function: Any, takes: tuple[str, ...]) -> str | None:
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [each.name for each in named if each.name not in takes and each.default is each.empty]
    if [each.name for each in named if each.name in takes] == list(takes) and not missing:
        return None
    return f"it takes {inspect.signature(function)}, and is called by ({', '.join(takes)})"


def _assigned(kind: type) -> set[str]:
    """Return the attributes that the source of a class assigns or annotates."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
