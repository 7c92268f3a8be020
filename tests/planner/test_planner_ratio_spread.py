"""What two plans are told apart by is what published pairs of runs say."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from planner.ranking import SAME_HARDWARE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ratio_spread.py"


def test_plans_on_the_same_hardware_are_told_apart_by_what_the_script_prints() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("whole and split layers")]
    pairs, groups, _, p90 = line.removeprefix("whole and split layers").split()
    assert int(pairs) > 500
    assert int(groups) > 20
    assert abs(math.exp(float(p90)) - 1 - SAME_HARDWARE) < 0.015
