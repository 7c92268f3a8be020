"""Ranks that `dsplan run` started with malformed variables: they end before any code of the script runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from starts import Ended, Starter, Variables, hydra, open_mpi, slurm, torchrun, without
from test_launch_rendezvous import free_port

from strategies.launch.settings import LauncherName, Placement
from strategies.launch.spec import LaunchSpec, failure_path
from strategies.rendezvous import SECONDS

Launcher = Callable[[int, int, int], Variables]
RANK_MAIN = "strategies.launch.rank_main"
STARTED_BY: list[tuple[Launcher, LauncherName, str]] = [
    (torchrun, "local", "WORLD_SIZE"),
    (open_mpi, "mpi", "OMPI_COMM_WORLD_SIZE"),
    (slurm, "slurm", "SLURM_STEP_NUM_TASKS"),
    (hydra, "mpi", "PMI_SIZE"),
]


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    started = Starter(tmp_path_factory.mktemp("starts"))
    yield started
    started.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run directory with the spec of a script that would leave a mark."""

    directory: Path
    spec: Path

    def reasons(self, ranks: int = 4) -> list[str]:
        """What the ranks that had a number wrote down, all expected."""
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
        kind="plain",
        processes=2,
        run_directory=str(directory),
        placement=Placement(launcher=launcher),
    )
    spec.save()
    return Run(directory=directory, spec=spec.path)


def start(starter: Starter, run: Run, processes: list[Variables]) -> list[Ended]:
    common = {SECONDS: "2", "DSPLAN_HOME": str(run.directory), "DSPLAN_RUN_DIR": str(run.directory)}
    common["HOME"] = os.environ["HOME"]
    ended = starter.run(RANK_MAIN, [{**one, **common} for one in processes], str(run.spec))
    assert not (run.directory / "ran").exists()
    assert [one.status for one in ended] == [2] * len(ended), [one.lines for one in ended]
    return ended


@pytest.mark.parametrize(("variables", "launcher", "size"), STARTED_BY)
def test_ranks_that_do_not_fit_end_before_the_script(
    variables: Launcher, launcher: LauncherName, size: str, starter: Starter, tmp_path: Path
) -> None:
    port = free_port()
    missing = laid_out(tmp_path / "missing", launcher)
    (nameless,) = start(starter, missing, [without(variables(1, 2, port), size)])
    (line,) = nameless.lines
    assert line.startswith("error: ")
    assert f"has not set {size} for this process; start" in line

    twice = laid_out(tmp_path / "twice", launcher)
    start(starter, twice, [variables(rank, 3, port) for rank in (0, 1, 1)])
    for reason in twice.reasons():
        assert "are both rank 1 of 3; give every process its own RANK" in reason
    assert len(twice.reasons()) == 2

    alone = laid_out(tmp_path / "alone", launcher)
    start(starter, alone, [variables(0, 2, port)])
    (reason,) = alone.reasons()
    assert "rank 1 has not come within 2 s; start 2 processes, or correct WORLD_SIZE" in reason

    lost = laid_out(tmp_path / "lost", launcher)
    start(starter, lost, [{**variables(1, 2, port), "MASTER_ADDR": "127.0.0.1"}])
    (reason,) = lost.reasons()
    assert f"cannot reach rank 0 at 127.0.0.1:{port} within 2 s; check MASTER_ADDR" in reason
