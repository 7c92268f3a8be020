"""Options of attempts, by the names of their fields and of the supervision's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.spec import SupervisionOptions


def attempt_options(**values: Any) -> AttemptOptions:
    """Return an attempt's options, with the defaults of `dsplan run` for what is not named."""
    watched = {name: values.pop(name) for name in SupervisionOptions.__slots__ if name in values}
    return AttemptOptions(supervision=replace(DEFAULT_SUPERVISION, **watched), **values)
