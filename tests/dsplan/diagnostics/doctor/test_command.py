"""`dsplan doctor` as a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "dsplan", "doctor", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_a_problem_is_one_line_with_what_to_do_and_status_one() -> None:
    finished = doctor(GLOO_SOCKET_IFNAME="none0")
    assert finished.returncode == 1
    assert finished.stderr == ""
    first, *_, last = finished.stdout.splitlines()
    assert first.startswith(
        "problem  interface GLOO_SOCKET_IFNAME is 'none0' and no interface that is up has that name"
    )
    assert "; unset it or name one of " in first
    assert last.startswith("1 problem, ")


def test_json_has_every_finding() -> None:
    finished = doctor("--json", CUDA_LAUNCH_BLOCKING="1")
    told = json.loads(finished.stdout)
    assert finished.returncode == (0 if told["healthy"] else 1)
    assert told["links"] == []
    settings = next(finding for finding in told["findings"] if finding["check"] == "settings")
    assert settings["level"] == "warning"
    assert set(settings) == {"level", "check", "message", "remedy", "hosts"}


def test_variables_that_contradict_each_other_are_one_line() -> None:
    finished = doctor(RANK="3", WORLD_SIZE="2")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("dsplan: the environment (RANK, WORLD_SIZE) says rank 3 of 2;")
    assert finished.stderr.count("\n") == 1
