"""Every key a config may have, by section, and the engines that read it: `known.yaml` as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hardware_db.files import read_shipped_yaml
from strategies.config import values
from strategies.config.values import CommunicationSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of one section."""

    read: frozenset[str] = frozenset()
    """Every engine follows them."""
    own: frozenset[str] = frozenset()
    """The same, and DeepSpeed does not have them."""
    hints: frozenset[str] = frozenset()
    """They steer how DeepSpeed works, not what it computes, and other engines need not care."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Only DeepSpeed follows them, so that other engines accept nothing but the default."""
    switched: frozenset[str] = frozenset()
    """Sections of DeepSpeed alone with keys of their own, which do nothing unless `enabled`."""
    opaque: frozenset[str] = frozenset()
    """Sections with any keys."""
    sections: Mapping[str, Keys] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All keys, sorted."""
        groups = (self.read, self.own, self.hints, self.defaults, self.switched, self.opaque, self.sections)
        return tuple(sorted(name for group in groups for name in group))


_GROUPS = ("read", "own", "hints", "switched", "opaque")


def _keys(entry: Mapping[str, Any]) -> Keys:
    """Return the keys of one section as `known.yaml` writes them."""
    groups = {group: {*entry.get(group, "").split(), *_fields(entry.get(f"{group}_fields"))} for group in _GROUPS}
    return Keys(
        **{group: frozenset(names) for group, names in groups.items()},
        defaults=entry.get("defaults", {}),
        sections={name: _keys(section) for name, section in entry.get("sections", {}).items()},
    )


def _fields(section: str | None) -> Iterator[str]:
    return (each.name for each in fields(getattr(values, section))) if section else iter(())


TOP = _keys(read_shipped_yaml(Path(__file__).with_name("known.yaml")))


# The part of a config that DeepSpeed gets: keys it knows, without those that dsplan handles itself.
_OURS_EVERYWHERE = ("scheduler", "tensorboard", "csv_monitor", "wall_clock_breakdown", "memory_breakdown")
"""Schedulers, metrics files and timers are made here under every strategy, so that they are the same under each."""


def for_deepspeed(values: Mapping[str, Any], communication: CommunicationSection) -> dict[str, Any]:
    """Return the config in DeepSpeed's words, where `auto` and `null` are left out as if they were not there."""
    theirs = {name: value for name, value in _without_own(values, TOP).items() if name not in _OURS_EVERYWHERE}
    dtype = communication.compression if communication.compression in ("fp16", "bf16") else communication.data_type
    return theirs if dtype is None else {**theirs, "communication_data_type": dtype}


def _without_own(values: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in keys.own or value is None or value == "auto":
            continue
        section = keys.sections.get(key)
        if section is None or not isinstance(value, Mapping):
            kept[key] = value
        elif inner := _without_own(value, section):
            kept[key] = inner
    return kept
