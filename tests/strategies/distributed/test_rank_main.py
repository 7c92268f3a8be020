"""Ranks that `dsplan run` started with malformed variables: they end before any code of the script runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.run_directory.files import failure_path
from strategies.run_directory.spec import LauncherName, LaunchSpec, Placement
from strategies.variables import RENDEZVOUS_SECONDS
from tests.strategies.distributed.starts import Starter, Variables, hydra, open_mpi, slurm, torchrun, without
from tests.strategies.distributed.test_rendezvous import free_port

Launcher = Callable[[int, int, int], Variables]
RANK_MAIN = "strategies.launch.rank_main"
STARTED_BY: list[tuple[Launcher, LauncherName, str]] = [
    (torchrun, "local", "WORLD_SIZE"),
    (open_mpi, "mpi", "OMPI_COMM_WORLD_SIZE"),
    (slurm, "slurm", "SLURM_STEP_NUM_TASKS"),
    (hydra, "mpi", "PMI_SIZE"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run directory with the spec of a script that would leave a mark."""

    directory: Path
    spec: Path

    def reasons(self, ranks: int = 4) -> list[str]:
        """Return what the ranks that had a number wrote down, all expected."""
        told = [failure_path(self.directory, rank) for rank in range(ranks)]
        failures = [json.loads(path.read_text()) for path in told if path.exists()]
        assert all(failure["expected"] for failure in failures)
        return [failure["message"] for failure in failures]


def laid_out(directory: Path, launcher: LauncherName) -> Run:
    directory.mkdir()
    script = directory / "train.py"
    script.write_text(f"open({str(directory / 'ran')!r}, 'w')\n")
    spec = LaunchSpec(
        script=str(script),
        processes=2,
        run_directory=str(directory),
        placement=Placement(launcher=launcher),
        supervision=DEFAULT_SUPERVISION,
    )
    spec.save()
    return Run(directory=directory, spec=spec.path)


def processes_of(run: Run, processes: list[Variables]) -> list[tuple[Variables, list[str]]]:
    common = {RENDEZVOUS_SECONDS: "2", "DSPLAN_HOME": str(run.directory), "DSPLAN_RUN_DIR": str(run.directory)}
    common["HOME"] = os.environ["HOME"]
    return [({**process, **common}, [str(run.spec)]) for process in processes]


@pytest.mark.parametrize(("variables", "launcher", "size"), STARTED_BY)
@pytest.mark.sweep(every=4)
def test_ranks_that_do_not_fit_end_before_the_script(
    variables: Launcher, launcher: LauncherName, size: str, starter: Starter, tmp_path: Path
) -> None:
    ports = [free_port() for _ in range(4)]
    missing, twice, alone, lost = runs = [laid_out(tmp_path / str(number), launcher) for number in range(4)]
    nameless, *ended = starter.run_each(
        RANK_MAIN,
        [
            *processes_of(missing, [without(variables(1, 2, ports[0]), size)]),
            *processes_of(twice, [variables(rank, 3, ports[1]) for rank in (0, 1, 1)]),
            *processes_of(alone, [variables(0, 2, ports[2])]),
            *processes_of(lost, [{**variables(1, 2, ports[3]), "MASTER_ADDR": "127.0.0.1"}]),
        ],
    )
    assert [process.status for process in (nameless, *ended)] == [2] * 6, [
        process.lines for process in (nameless, *ended)
    ]
    assert not [run for run in runs if (run.directory / "ran").exists()]

    assert len(nameless.lines) == 1, nameless.lines
    (line,) = nameless.lines
    assert line.startswith("error: ")
    assert f"has not set {size} for this process; start" in line
    for reason in twice.reasons():
        assert "are both rank 1 of 3; give every process its own RANK" in reason
    assert len(twice.reasons()) == 2
    (reason,) = alone.reasons()
    assert "rank 1 has not come within 2 s; start 2 processes, or correct WORLD_SIZE" in reason
    (reason,) = lost.reasons()
    assert f"cannot reach rank 0 at 127.0.0.1:{ports[3]} within 2 s; check MASTER_ADDR" in reason
