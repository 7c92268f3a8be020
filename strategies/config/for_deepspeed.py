"""What DeepSpeed gets of a config: only what it knows, and nothing that dsplan does for every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.config.known import TOP, Known
from strategies.config.values import CommunicationSection

_OURS_EVERYWHERE = ("scheduler", "tensorboard", "csv_monitor", "wall_clock_breakdown", "memory_breakdown")
"""Schedulers, metrics files and timers are made here under every strategy, so that they are the same under each."""


def for_deepspeed(values: Mapping[str, Any], communication: CommunicationSection) -> dict[str, Any]:
    """The config in DeepSpeed's words, where `auto` and `null` are left out as if they were not there."""
    known = _known(values, TOP)
    for name in _OURS_EVERYWHERE:
        known.pop(name, None)
    wire = communication.compression if communication.compression in ("fp16", "bf16") else communication.data_type
    return known if wire is None else {**known, "communication_data_type": wire}


def _known(values: Mapping[str, Any], known: Known) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in known.own or value is None or value == "auto":
            continue
        section = known.sections.get(key)
        if section is None or not isinstance(value, Mapping):
            kept[key] = value
        elif inner := _known(value, section):
            kept[key] = inner
    return kept
