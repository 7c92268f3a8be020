"""What a hook tells the person at the terminal, once, from rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def say(sentence: str) -> None:
    """Print a line on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"dsplan: {sentence}", flush=True)


def say_replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Name every setting of the script that the plan changed; nothing where it changed none."""
    changed = [
        f"{name} {_short(before.get(name))} -> {_short(value)}"
        for name, value in after.items()
        if before.get(name) != value and not (_is_off(before.get(name)) and _is_off(value))
    ]
    if changed:
        say("the plan replaces " + ", ".join(changed))


def _is_off(value: Any) -> bool:
    return not value or value == "no"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        stage = value.get("stage", value.get("zero_optimization", {}).get("stage"))
        return f"stage {stage}" if stage is not None else "{...}"
    return "unset" if value is None else str(value)
