"""Every launcher's malformed starts, as processes of their own: each ends soon, in one line with what to change."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from strategies.distributed.rank_check import FIRST_SECONDS
from strategies.variables import RENDEZVOUS_SECONDS
from tests.strategies.distributed.starts import (
    ROOT,
    Ended,
    Starter,
    Variables,
    hydra,
    open_mpi,
    slurm,
    torchrun,
    without,
)
from tests.strategies.distributed.test_rendezvous import free_port

Launcher = Callable[[int, int, int], Variables]
LAUNCHERS: list[Launcher] = [torchrun, open_mpi, slurm, hydra]
RANK_AND_SIZE: dict[Launcher, tuple[str, str]] = {
    torchrun: ("RANK", "WORLD_SIZE"),
    open_mpi: ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    slurm: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    hydra: ("PMI_RANK", "PMI_SIZE"),
}
SCRIPT = "import dsplan, torch\ndsplan.initialize(model=torch.nn.Linear(2, 2))\n"
LIMIT = {RENDEZVOUS_SECONDS: "2"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def lines_of(ended: list[Ended]) -> list[str]:
    """All that was said: lines of dsplan's own, at most one a process, from processes that ended with status 2."""
    assert [process.status for process in ended] == [2] * len(ended), [process.lines for process in ended]
    assert max(process.seconds for process in ended) < 200, "torch alone waits ten minutes"
    assert all(len(process.lines) <= 1 for process in ended), [process.lines for process in ended]
    lines = [line for process in ended for line in process.lines]
    assert all(line.startswith("dsplan: ") for line in lines)
    return lines


MISSING = [(launcher, name) for launcher in LAUNCHERS for name in launcher(0, 2, 1)]
HARMLESS = {
    (torchrun, "LOCAL_RANK"),
    (torchrun, "LOCAL_WORLD_SIZE"),
    (torchrun, "MASTER_ADDR"),
    (slurm, "SLURM_JOB_ID"),
    (slurm, "SLURM_STEP_ID"),
    (slurm, "SLURM_STEP_NODELIST"),
    (open_mpi, "PMIX_NAMESPACE"),
    *((launcher, "MASTER_PORT") for launcher in LAUNCHERS),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.sweep(every=4)
def test_a_missing_variable_is_named(launcher: Launcher, starter: Starter, script: Path) -> None:
    names = [name for starts, name in MISSING if starts is launcher and (starts, name) not in HARMLESS]
    ended = starter.run(script, [without({**launcher(1, 2, free_port()), **LIMIT}, name) for name in names])
    for name, process in zip(names, ended, strict=True):
        (line,) = lines_of([process])
        assert name in line
        assert "; start" in line
    assert len(names) >= 2


Jobs = list[tuple[Launcher, int, list[Ended]]]


@pytest.fixture(scope="module")
def jobs(starter: Starter, script: Path) -> Callable[[Callable[[Launcher, int], list[Variables]]], Jobs]:
    """One job per launcher, all at the same time; of each its port, and how its processes ended."""

    def run(processes_of: Callable[[Launcher, int], list[Variables]]) -> Jobs:
        ports = [free_port() for _ in LAUNCHERS]
        starts = [
            [{**variables, **LIMIT} for variables in processes_of(launcher, port)]
            for launcher, port in zip(LAUNCHERS, ports, strict=True)
        ]
        ended = iter(starter.run(script, [process for processes in starts for process in processes]))
        return [
            (launcher, port, [next(ended) for _ in processes])
            for launcher, port, processes in zip(LAUNCHERS, ports, starts, strict=True)
        ]

    return run


RunJobs = Callable[[Callable[[Launcher, int], list[Variables]]], Jobs]


def test_two_ranks_with_one_id_are_named_once_on_their_node(jobs: RunJobs) -> None:
    for _, _, ended in jobs(lambda launcher, port: [launcher(rank, 3, port) for rank in (0, 1, 1)]):
        (line,) = lines_of(ended)
        assert "are both rank 1 of 3; give every process its own RANK" in line


def test_too_few_processes_are_reported_once_on_their_node(jobs: RunJobs) -> None:
    for _, _, ended in jobs(lambda launcher, port: [launcher(rank, 4, port) for rank in (0, 2)]):
        (line,) = lines_of(ended)
        assert "ranks 1, 3 have not come within 2 s; start 4 processes, or correct WORLD_SIZE" in line


def test_two_world_sizes_are_reported_once_on_their_node(jobs: RunJobs) -> None:
    for _, _, ended in jobs(lambda launcher, port: [launcher(rank, 2 + rank, port) for rank in (0, 1)]):
        (line,) = lines_of(ended)
        assert "counts 2 ranks and rank 1" in line
        assert "counts 3; give all of them one WORLD_SIZE" in line


def test_an_address_where_nobody_is_is_named(jobs: RunJobs) -> None:
    for _, port, ended in jobs(lambda launcher, port: [{**launcher(1, 2, port), "MASTER_ADDR": "127.0.0.1"}]):
        (line,) = lines_of(ended)
        assert f"cannot reach rank 0 at 127.0.0.1:{port} within 2 s; check MASTER_ADDR and MASTER_PORT" in line


def test_a_host_that_nobody_knows_is_named(jobs: RunJobs) -> None:
    unknown = {"MASTER_ADDR": "no-such-host.invalid"}
    for _, _, ended in jobs(lambda launcher, port: [{**launcher(1, 2, port), **unknown}]):
        (line,) = lines_of(ended)
        assert "finds no host 'no-such-host.invalid'" in line
        assert "; set MASTER_ADDR to a name or address of rank 0's host that every node knows" in line


def test_a_port_that_is_none_is_reported(jobs: RunJobs) -> None:
    for _, _, ended in jobs(lambda launcher, port: [{**launcher(1, 2, port), "MASTER_PORT": "99999"}]):
        (line,) = lines_of(ended)
        assert "MASTER_PORT is 99999; ports are 1 to 65535" in line


def test_a_rank_beyond_the_last_is_reported(jobs: RunJobs) -> None:
    for _, _, ended in jobs(lambda launcher, port: [{**launcher(1, 2, port), RANK_AND_SIZE[launcher][0]: "2"}]):
        (line,) = lines_of(ended)
        assert "says rank 2 of 2; ranks count from 0, so the highest is 1" in line


def test_a_size_that_is_no_number_is_reported(jobs: RunJobs) -> None:
    for launcher, _, ended in jobs(
        lambda launcher, port: [{**launcher(1, 2, port), RANK_AND_SIZE[launcher][1]: "two"}]
    ):
        (line,) = lines_of(ended)
        assert f"the environment variable {RANK_AND_SIZE[launcher][1]} is 'two'; it must be a whole number" in line


def test_a_first_rank_elsewhere_is_told_that_its_address_is_not_its_own(starter: Starter, script: Path) -> None:
    # 198.51.100.0/24 is for documentation (RFC 5737).
    variables = {**torchrun(0, 2, free_port()), **LIMIT, "MASTER_ADDR": "198.51.100.254"}
    (line,) = lines_of(starter.run(script, [variables]))
    assert "within 2 s" in line
    assert "MASTER_ADDR 198.51.100.254 is no address of" in line


@pytest.mark.slow
def test_another_program_at_the_address_is_reported_without_pages(starter: Starter, script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        variables = {**torchrun(1, 2, other.getsockname()[1]), **LIMIT}
        (line,) = lines_of(starter.run(script, [variables]))
    assert "cannot reach rank 0 at 127.0.0.1:" in line


def test_variables_that_hide_the_launchers_are_named(starter: Starter, script: Path) -> None:
    port = free_port()
    exported = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", RENDEZVOUS_SECONDS: "8"}
    (line,) = lines_of(starter.run(script, [{**slurm(rank, 3, port), **exported} for rank in range(3)]))
    assert "are both rank 0 of 3; give every process its own RANK" in line
    assert "of 3, which RANK and WORLD_SIZE hide: unset both" in line


def test_a_port_that_another_program_has_is_reported(starter: Starter, script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        variables = {**torchrun(0, 2, other.getsockname()[1]), **LIMIT}
        (line,) = lines_of(starter.run(script, [variables]))
    assert "cannot listen at 127.0.0.1:" in line
    assert "(address already in use); another program has the port: set MASTER_PORT to a free one" in line


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_a_limit_of_its_own_a_malformed_start_ends_long_before_torch_alone_would(
    launcher: Launcher, script: Path, starter: Starter
) -> None:
    port, other = free_port(), free_port()
    alone = {**launcher(1, 2, other), "MASTER_ADDR": "198.51.100.254"}
    *few, unreachable = starter.run(script, [launcher(0, 3, port), launcher(1, 3, port), alone])
    for ended in (few, [unreachable]):
        assert max(process.seconds for process in ended) < 200, "torch alone waits ten minutes"
        (line,) = [line for process in ended for line in process.lines]
        assert f"within {FIRST_SECONDS:g} s" in line


@pytest.mark.slow
def test_an_interpreter_of_its_own_says_one_line_and_ends_with_status_two(script: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "2", "WORLD_SIZE": "2"}
    finished = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("dsplan: the environment (RANK, WORLD_SIZE) says rank 2 of 2; ")
    assert finished.stderr.count("\n") == 1


def test_ranks_of_every_launcher_that_fit_together_begin(starter: Starter, tmp_path: Path) -> None:
    path = tmp_path / "sum.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "from strategies.distributed.environment import join\n"
        "environment = join()\n"
        "one = torch.ones(1)\n"
        "dist.all_reduce(one)\n"
        "print(environment.rank, int(one))\n"
        "dist.destroy_process_group()\n"
        "again = join()\n"
        "dist.all_reduce(one)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    started = [launcher(rank, 2, port) for launcher in LAUNCHERS for port in [free_port()] for rank in range(2)]
    ended = starter.run(path, started)
    assert [process.lines for process in ended] == [["0 2"], ["1 2"]] * len(LAUNCHERS)
    assert {process.status for process in ended} == {0}
