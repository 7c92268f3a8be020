"""The section `monitor`, and the same settings by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.config.fields import Fields
from strategies.errors import CannotRun
from strategies.monitoring.settings import MonitorSettings, Threshold


def monitor_section(fields: Fields) -> MonitorSettings:
    """`monitor`.

    Raises:
        CannotRun: a value is not of its kind.
    """
    default = MonitorSettings()
    sample_seconds = fields.number("sample_seconds", default.sample_seconds)
    if sample_seconds <= 0:
        fields.refuse("sample_seconds", "a number above 0")
    slowdown = fields.number("slowdown", default.slowdown)
    if 0 < slowdown <= 1:
        fields.refuse("slowdown", "a number above 1, or 0 for none")
    return MonitorSettings(
        enabled=fields.maybe_flag("enabled"),
        output_path=fields.text("output_path", default.output_path),
        sample_seconds=sample_seconds,
        loss_spike=fields.number("loss_spike", default.loss_spike),
        slowdown=slowdown,
        memory_growth=fields.number("memory_growth", default.memory_growth),
        gpu=fields.flag("gpu", True),
        cpu=fields.flag("cpu", True),
        network=fields.flag("network", True),
        thresholds={**default.thresholds, **_thresholds(fields.section("thresholds"))},
    )


def _thresholds(fields: Fields) -> dict[str, Threshold]:
    """`{"loss": {"above": 10}}`; a figure that has none is left out."""
    found = {}
    for name in fields.values:
        limits = fields.section(str(name))
        for key in limits.values:
            if key not in ("above", "below"):
                fields.refuse(str(name), 'written as {"above": number} or {"below": number}')
        found[str(name)] = Threshold(**{key: limits.real(key) for key in ("above", "below") if limits.has(key)})
    return found


def read_settings(values: Mapping[str, Any], *, place: str) -> MonitorSettings:
    """Settings from a dictionary with the keys of the section.

    Raises:
        CannotRun: a key is not known, or a value is not of its kind.
    """
    known = [name for name in MonitorSettings.__dataclass_fields__ if name not in ("enabled", "output_path")]
    for name in values:
        if name not in known:
            raise CannotRun(f"{place}: {name} is not known; it can be {', '.join(known)}")
    return monitor_section(Fields(values, place))
