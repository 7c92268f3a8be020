"""The example scripts, run on ranks as torchrun would run them."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest

from strategies.telemetry.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"


def run_example(name: str, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    """An example on a rank, unchanged."""
    script = EXAMPLES / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(script), run_name="__main__")


def losses_of(directory: Path) -> list[float]:
    """The loss of every step over the global batch: the mean of both ranks' means."""
    losses = [[row["loss"] for row in rows if row["event"] == "step"] for rows in read_metrics(directory, 2)]
    return [fmean(pair) for pair in zip(*losses, strict=True)]
