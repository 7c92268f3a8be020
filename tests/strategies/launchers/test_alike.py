"""The same training has the same losses whoever starts its ranks: SLURM, Open MPI, DeepSpeed, accelerate, two nodes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.strategies.launchers import namespaces
from tests.strategies.launchers.launched import launched


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses on two ranks that torch elastic starts."""
    with launched(tmp_path_factory.mktemp("local")) as run:
        assert run.wait(run.start("--nproc", "2")) == 0, run.out
        return run.losses()


@pytest.mark.slow  # scripts/ci/launchers.sh installs what these need
def test_slurm(slurm: dict[str, str], reference: list[float], tmp_path: Path) -> None:
    with launched(tmp_path, slurm) as run:
        assert run.wait(run.start("--launcher", "slurm", "--nproc", "2")) == 0, run.out
        assert run.losses() == reference


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI (openmpi-bin)")
def test_open_mpi_with_four_ranks(reference: list[float], tmp_path: Path) -> None:
    with launched(tmp_path) as run:
        assert run.wait(run.start("--launcher", "mpi", "--nproc", "4")) == 0, run.out
        assert {ranks for _, ranks, _ in run.rows()} == {4}
        # Sums over four ranks are rounded in another order than over two.
        assert run.losses() == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow  # tests/planner/emit starts ranks with it in the suite
def test_deepspeed(reference: list[float], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    with launched(tmp_path) as run:
        assert run.wait(run.start("--launcher", "deepspeed", "--nproc", "2")) == 0, run.out
        assert run.losses() == reference


@pytest.mark.slow  # tests/planner/emit starts ranks with it in the suite
def test_accelerate(reference: list[float], tmp_path: Path) -> None:
    with launched(tmp_path) as run:
        assert run.wait(run.start("--launcher", "accelerate", "--nproc", "2")) == 0, run.out
        assert run.losses() == reference


@pytest.mark.slow  # two nodes on one address meet in tests/planner/emit/test_torchrun.py in the suite
def test_two_nodes_in_network_namespaces(reference: list[float], tmp_path: Path) -> None:
    if reason := namespaces.missing():
        pytest.skip(reason)
    with namespaces.namespaces(2) as nodes, launched(tmp_path) as run:
        options = ("--nproc", "1", "--nodes", "2", "--rendezvous", f"{namespaces.address(0)}:29400")
        options += ("--checkpoint-dir", str(tmp_path / "checkpoints"))
        started = [
            run.start(*options, before=node, run_directory=tmp_path / f"node{number}")
            for number, node in enumerate(nodes)
        ]
        assert [run.wait(process) for process in started] == [0, 0], run.out
        assert run.losses() == reference


@pytest.mark.slow
def test_slurm_saves_when_it_is_asked_to_stop(slurm: dict[str, str], reference: list[float], tmp_path: Path) -> None:
    with launched(tmp_path, {**slurm, "PAUSE": "0.5"}) as run:
        process = run.start("--launcher", "slurm", "--nproc", "2")
        run.until_step(2)
        process.send_signal(signal.SIGTERM)
        assert run.wait(process) == 75, run.out
        assert len(run.rows()) < len(reference)
        endings = [json.loads(line) for line in (run.run_directory / "run.jsonl").read_text().splitlines()]
        assert [row["kind"] for row in endings if row["event"] == "ending"] == ["preempted"]
        assert run.wait(run.resume()) == 0, run.out
        assert run.losses() == reference
