"""Two plans are told apart by what published runs say of pairs, and of single predictions."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from planner.search.ranking import NEVER_COMPARED, ONE_STRATEGY, SPLIT_OR_WHOLE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def lines() -> dict[str, list[str]]:
    command = [sys.executable, "-m", "scripts.fit.ratio_spread"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line[:24].strip(): line[24:].split() for line in completed.stdout.splitlines()}


def test_split_and_whole_layers(lines: dict[str, list[str]]) -> None:
    pairs, groups, _, p90 = lines["whole and split layers"]
    assert int(pairs) > 500
    assert int(groups) > 20
    assert abs(math.exp(float(p90)) - 1 - SPLIT_OR_WHOLE) < 0.015


def test_two_plans_of_one_strategy(lines: dict[str, list[str]]) -> None:
    pairs, groups, _, p90 = lines["one strategy"]
    assert int(pairs) > 500
    assert int(groups) > 20
    assert abs(math.exp(float(p90)) - 1 - ONE_STRATEGY) < 0.015


def test_what_was_never_compared_differs_by_two_single_predictions(lines: dict[str, list[str]]) -> None:
    runs, *_, p90 = lines["single predictions"]
    assert int(runs) > 300
    assert abs(math.sqrt(2) * float(p90) - NEVER_COMPARED) < 0.03
