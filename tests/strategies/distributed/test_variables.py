"""Rank and place of a process, from the variables of each launcher, and the line that says what is wrong there."""

from __future__ import annotations

import pytest

from strategies.distributed.launcher_env import (
    Address,
    ProcessVariables,
    first_host,
    publish_process_variables,
    read_process_variables,
    tasks_on_node,
)
from strategies.errors import CannotRun

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29512",
}
# What `mpirun -n 2` of Open MPI 4.1.4 sets.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "508559361",
}
# srun(1): three nodes, `-n 7`.
SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def numbers(process: ProcessVariables) -> tuple[int, int, int, int]:
    return process.rank, process.world_size, process.local_rank, process.local_world_size


@pytest.mark.parametrize(
    ("variables", "expected", "host"),
    [
        (TORCHRUN, (5, 8, 1, 4), "node0"),
        (OPEN_MPI, (1, 2, 1, 2), "127.0.0.1"),
        (SLURM, (6, 7, 0, 1), "gpu03"),
        (HYDRA, (0, 2, 0, 2), "127.0.0.1"),
    ],
)
def test_every_launcher_is_understood(
    variables: dict[str, str], expected: tuple[int, int, int, int], host: str
) -> None:
    process = read_process_variables(variables)
    assert numbers(process) == expected
    assert process.meeting_point is not None
    assert process.meeting_point.host == host
    published: dict[str, str] = {}
    publish_process_variables(process, published)
    assert numbers(read_process_variables(published)) == expected
    assert read_process_variables(published).meeting_point == process.meeting_point


def test_without_a_launcher_a_process_is_alone() -> None:
    # The shell of a batch script has SLURM's variables of the job, and is no rank.
    process = read_process_variables({"SLURM_JOB_ID": "41", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    assert (*numbers(process), process.meeting_point) == (0, 1, 0, 1, None)
    published: dict[str, str] = {}
    publish_process_variables(process, published)
    assert published == {}


def test_a_process_alone_may_choose_its_gpu() -> None:
    assert read_process_variables({"LOCAL_RANK": "3"}).local_rank == 3


def test_what_a_wrapper_sets_comes_before_what_the_launcher_sets() -> None:
    assert numbers(read_process_variables({**OPEN_MPI, **TORCHRUN})) == (5, 8, 1, 4)


def test_jobs_on_one_machine_have_ports_of_their_own() -> None:
    ports = set()
    for job in range(50):
        point = read_process_variables({**OPEN_MPI, "PMIX_NAMESPACE": str(508559361 + job)}).meeting_point
        assert point is not None
        assert 20000 <= point.port < 32000
        ports.add(point.port)
    assert len(ports) > 45
    clusters = [read_process_variables({**SLURM, "SLURM_CLUSTER_NAME": name}).meeting_point for name in ("red", "blue")]
    assert clusters[0] != clusters[1]  # each has numbered a job of its own 41
    named = read_process_variables({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "1234"})
    assert named.meeting_point == Address(host="a", port=1234)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "0"}, "has not set WORLD_SIZE for this process; start all ranks with one launch command"),
        ({"WORLD_SIZE": "2"}, "has not set RANK"),
        ({**TORCHRUN, "RANK": "one"}, "the environment variable RANK is 'one'; it must be a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "RANK": "8"}, "says rank 8 of 8; ranks count from 0, so the highest is 7"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "says local rank 4 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16", "LOCAL_RANK": "1"}, "16 ranks on this node and 8 in all"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports are 1 to 65535"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "on several nodes and MASTER_ADDR is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI starts 4 ranks on several nodes and MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "Open MPI has not set OMPI_COMM_WORLD_SIZE"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3"}, "which has no count for this node; start with srun"),
        ({**SLURM, "SLURM_PROCID": "7"}, "SLURM says rank 7 of 7"),
        ({**HYDRA, "MPI_LOCALNRANKS": ""}, "MPICH or Intel MPI has not set MPI_LOCALNRANKS"),
    ],
)
def test_malformed_variables_are_reported_in_one_line(variables: dict[str, str], complaint: str) -> None:
    with pytest.raises(CannotRun) as refusal:
        read_process_variables(variables)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu1", "gpu1"), ("a,b", "a"), ("gpu[03-06,9],cpu1", "gpu03"), ("n[7,9]-ib", "n7-ib"), ("", "")],
)
def test_the_first_host_of_a_node_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3), (3, 8)])
def test_tasks_of_a_node(node: int, tasks: int) -> None:
    assert tasks_on_node("4(x2),3,8", node) == tasks
