"""The optimizers and schedulers that a config can name, and where each is: `names.yaml` as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware_db.files import read_shipped_yaml
from hardware_db.from_json import from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """An optimizer or scheduler that a config can name."""

    name: str
    """As messages and configs spell it."""
    path: str
    """As module:attribute."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's, where they are not the class's own."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of DeepSpeed's class that change nothing here: any value where None is written, else that alone."""
    accepts: str | None = None
    """What has the signature, where `path` is a function that passes its arguments on."""
    more: tuple[str, ...] = ()
    """Further names of arguments."""


def plain(name: str) -> str:
    """Return a name as it is looked up: `AdamW_8bit` and `adamw-8bit` are one."""
    return name.lower().replace("-", "").replace("_", "")


_TABLE = read_shipped_yaml(Path(__file__).with_suffix(".yaml"))


def _read(table: Mapping[str, Any]) -> dict[str, Named]:
    named = [from_json(Named, entry) for entry in table["described"]]
    for module, names in table["classes"].items():
        named += [Named(name=name, path=f"{module}:{name}") for name in names.split()]
    return {plain(choice.name): choice for choice in named}


OPTIMIZERS: Mapping[str, Named] = _read(_TABLE["optimizers"])
SCHEDULERS: Mapping[str, Named] = _read(_TABLE["schedulers"])
DEEPSPEEDS_OWN, MADE_BY_DEEPSPEED_ON_CPU = (
    tuple(_TABLE["optimizers"][kind].split()) for kind in ("deepspeed", "deepspeed_cpu")
)
