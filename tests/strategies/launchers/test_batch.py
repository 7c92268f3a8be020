"""A batch job of `dsplan emit --format slurm` on a real SLURM: told to save, it is queued again and continues."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.strategies.launchers.launched import ROOT, SCRIPT, launched

JOB_SECONDS = 200.0


@contextlib.contextmanager
def on_path(directory: Path) -> Iterator[str]:
    """A PATH on which `dsplan` is this repository's."""
    command = directory / "dsplan"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsplan "$@"\n')
    command.chmod(0o755)
    yield f"{directory}:{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_told_to_save_resumes_when_it_is_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    with launched(tmp_path / "local", {"STEPS": "12"}) as run:
        assert run.wait(run.start("--nproc", "2")) == 0, run.out
        reference = run.losses()
        plan = run.run_directory / "plan.yaml"
    directory = tmp_path / "job"
    directory.mkdir()
    with on_path(tmp_path) as path:
        variables = {"PATH": path, "PYTHONPATH": str(ROOT), "LOSSES": str(directory / "losses"), "STEPS": "12"}
        environment = {**os.environ, **slurm, **variables, "PAUSE": "0.5", "OMP_NUM_THREADS": "1"}

        def ask(*words: str) -> str:
            return subprocess.run(
                words, cwd=directory, env=environment, capture_output=True, text=True, check=True
            ).stdout.strip()

        ask(sys.executable, "-m", "dsplan", "emit", str(plan), "--format", "slurm", "--out", str(directory))
        job = ask("sbatch", "--parsable", "slurm.sh", str(SCRIPT))
        losses = directory / "losses"
        _until(lambda: losses.exists() and len(losses.read_text().splitlines()) >= 3, directory)
        ask("scancel", "--signal=USR1", "--batch", job)
        _until(lambda: "COMPLETED" in ask("scontrol", "show", "job", job), directory)
        assert "Restarts=1" in ask("scontrol", "show", "job", job)
    rows = [line.split() for line in losses.read_text().splitlines()]
    assert [int(row[0]) for row in rows] == list(range(1, 13)), "a step was trained twice, or not at all"
    assert [float(row[2]) for row in rows] == reference


def _until(condition: Callable[[], bool], directory: Path) -> None:
    deadline = time.monotonic() + JOB_SECONDS
    while not condition():
        logs = "".join(path.read_text() for path in directory.glob("slurm-*.out"))
        assert time.monotonic() < deadline, f"waited {JOB_SECONDS:g} s:\n{logs}"
        time.sleep(0.2)
