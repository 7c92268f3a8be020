"""`dsplan bench` as a process of its own, as a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsplan.diagnostics.bench.plan import BenchPlan, save_bench_plan
from hardware_db.microbench.grid import Point

ROOT = Path(__file__).resolve().parents[4]
# A process that a shell started in the background ignores SIGINT, and so would all that it starts, these tests too.
_WITH_CTRL_C = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " runpy.run_module('dsplan', run_name='__main__')"
)


def start_bench(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """`dsplan bench ...`, running."""
    command = [sys.executable, "-c", _WITH_CTRL_C, "bench", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The one JSON object that a benchmark with --json printed."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


def plan_file(folder: Path, points: Iterable[Point]) -> Path:
    """A benchmark of these points."""
    path = folder / "bench.yaml"
    save_bench_plan(BenchPlan(device="cpu", points=tuple(points)), path)
    return path
