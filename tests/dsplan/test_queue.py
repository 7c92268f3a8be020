"""`dsplan queue`: the plan that ends first, as a queue says when jobs would start."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.dsplan.cli import Cli
from tests.strategies.launchers import one_node_slurm

SIXTEEN = "queue --model opt-1.3b --gpus 16 --gpu A100-SXM4-80GB --global-batch 64"
_SBATCH = """\
echo "$@" >> "{log}"
case "$*" in
*--partition=nope*) echo "sbatch: error: invalid partition specified: nope" >&2
    echo "allocation failure: Invalid partition name specified" >&2; exit 1;;
*--nodes=2*) start={later};;
*) start={now};;
esac
echo "sbatch: Job 7 to start at $start using 8 processors on nodes n1 in partition a100" >&2
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a queue in which one node is free now and two are in 30 hours."""
    now = datetime.now() + timedelta(seconds=60)
    times = {"now": f"{now:%Y-%m-%dT%H:%M:%S}", "later": f"{now + timedelta(hours=30):%Y-%m-%dT%H:%M:%S}"}
    commands = {
        "sbatch": _SBATCH.format(log=tmp_path / "log", **times),
        "squeue": "printf '5\\n6_1\\n6_2\\n'",
        "sinfo": "printf 'n1 idle\\nn1 idle\\nn2 alloc\\nn3 idle*\\n'",
    }
    for name, text in commands.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path / "log"


def test_fewer_gpus_end_first_where_more_have_to_wait(cli: Cli, slurm: Path) -> None:
    answer = cli(f"{SIXTEEN} --tokens 10B --slurm-option=--partition=a100 --json").json
    assert (answer["waiting_jobs"], answer["nodes"], answer["idle_nodes"]) == (3, 3, 2)
    gpus = [turn["gpus"] for turn in answer["turns"]]
    assert gpus[0] == 8
    assert sorted(gpus) == [1, 2, 4, 8, 16]
    ends = [datetime.fromisoformat(turn["ends"]) for turn in answer["turns"]]
    assert ends == sorted(ends)
    for turn in answer["turns"]:
        steps = 10e9 / (64 * 2048)
        assert turn["train_seconds"] == pytest.approx(steps * turn["step_seconds"])
        assert turn["limit_minutes"] * 60 > turn["train_seconds"]
        assert turn["gpu_hours"] == pytest.approx(turn["gpus"] * turn["train_seconds"] / 3600)
    words = slurm.read_text().splitlines()
    assert all("--test-only" in line and "--partition=a100 --wrap=true" in line for line in words)
    assert "--nodes=2 --ntasks-per-node=8" in words[0]
    assert "--gpus-per-node=8 --exclusive" in words[1]
    assert "--gpus-per-node=4 --partition" in words[2]  # part of a node leaves the rest to others


def test_all_gpus_end_first_where_training_takes_far_longer_than_the_wait(cli: Cli, slurm: Path) -> None:
    printed = cli(f"{SIXTEEN} --tokens 300B")
    assert printed.status == 0
    assert "3 jobs wait; 2 of 3 nodes idle" in printed.out
    assert "first to end: ddp on 16 x A100-SXM4-80GB, " in printed.out


def test_a_queue_that_refuses_says_why(cli: Cli, slurm: Path) -> None:
    printed = cli(f"{SIXTEEN} --tokens 1B --slurm-option=--partition=nope")
    assert printed.status == 1
    assert "16 x A100-SXM4-80GB: invalid partition specified: nope" in printed.out
    assert "first to end" not in printed.out


def test_what_no_calendar_reaches_is_refused_without_asking(cli: Cli, slurm: Path) -> None:
    printed = cli(f"{SIXTEEN} --tokens {10**18}")
    assert printed.status == 1
    assert "16 x A100-SXM4-80GB: it would train for more than a century" in printed.out
    assert not slurm.exists()


def test_a_start_that_nobody_knows_is_one_line(cli: Cli, slurm: Path) -> None:
    command = slurm.parent / "bin" / "sbatch"
    command.write_text("#!/bin/sh\necho 'sbatch: Job 7 to start at N/A in partition a100' >&2\n")
    assert "neither when a job would start nor why not" in cli.refuses(f"{SIXTEEN} --tokens 1B")


def test_what_cannot_be_asked_is_said_in_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "give --tokens" in cli.refuses(SIXTEEN)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squeue cannot be run" in cli.refuses(f"{SIXTEEN} --tokens 1B")


@pytest.mark.slow
def test_slurm_itself_says_when_a_job_would_start(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := one_node_slurm.missing():
        pytest.skip(reason)
    with one_node_slurm.one_node_slurm() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        subprocess.run(["sbatch", "--exclusive", "--nodes=1", "--time=90", "--wrap", "sleep 300"], check=True)
        answer = cli("queue --model gpt2 --gpus 2 --gpu cpu --tokens 10M --json").json
        subprocess.run(["scancel", "--user=root"], check=True)
    assert answer["nodes"] == 1
    starts = [datetime.fromisoformat(turn["starts"]) - datetime.now() for turn in answer["turns"]]
    assert all(timedelta(minutes=85) < wait < timedelta(minutes=91) for wait in starts)
