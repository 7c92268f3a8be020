"""Lines that launchers print of their ranks' ends, and the command lines they are started with; no process is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import DsplanError
from strategies.launch.launchers.launcher import make_launcher
from strategies.launch.launchers.mpi import first_words, job_result
from strategies.launch.launchers.process import ProcessLauncher
from strategies.launch.launchers.slurm import step_result
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.run_directory.files import AGENT_LOG
from strategies.run_directory.spec import LAUNCHER_NAMES, LaunchSpec, Placement

BY_SIGNAL = "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed)."
BY_STATUS = """\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[12922,1],2]
  Exit code:    3
"""


def launcher(directory: Path, **placement: Any) -> ProcessLauncher:
    spec = LaunchSpec(
        script="train.py",
        processes=2,
        run_directory=str(directory),
        placement=Placement(**placement),
        supervision=DEFAULT_SUPERVISION,
    )
    process_launcher = make_launcher(spec)
    assert isinstance(process_launcher, ProcessLauncher)
    return process_launcher


@pytest.mark.parametrize(
    ("output", "failures"),
    [
        ("srun: error: vm: tasks 0-1: Exited with exit code 75\n", {0: 75, 1: 75}),
        ("srun: error: node[1-2]: tasks 0,3-4: Exited with exit code 1\n", {0: 1, 3: 1, 4: 1}),
        ("srun: error: vm: task 1: Terminated\n", {1: -15}),
        ("srun: error: vm: task 1: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=4.0\n", {1: -9}),
        ("srun: error: vm: task 0: Segmentation fault (core dumped)\n", {0: -11}),
        ("srun: cluster configuration lacks support for cpu binding\n", {}),
    ],
)
def test_srun_tells_how_ranks_ended(output: str, failures: dict[int, int]) -> None:
    assert step_result(output) == {"failures": failures}


def test_slurm_tells_of_memory_and_of_nodes() -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: vm: task 1: Out Of Memory\n"
    assert step_result(killed)["kind"] == "out_of_memory"
    assert step_result(killed)["failures"] == {1: -9}
    assert step_result("srun: error: Node failure on node7\n")["kind"] == "lost"


@pytest.mark.parametrize(("output", "failures"), [(BY_SIGNAL, {1: -9}), (BY_STATUS, {2: 3}), ("", {})])
def test_mpirun_tells_which_rank_was_first(output: str, failures: dict[int, int]) -> None:
    assert job_result(output) == {"failures": failures}


@pytest.mark.parametrize(("status", "kind"), [(1, "failed"), (127, "failed"), (137, None), (143, None), (-9, None)])
def test_mpirun_ended_by_a_signal_has_not_failed(status: int, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / AGENT_LOG).write_text("")
    result = launcher(tmp_path, launcher="mpi").result(status)
    assert result is not None
    assert result.get("kind") == kind


def test_what_mpirun_says_before_any_rank_is_the_reason() -> None:
    output = f"{'-' * 60}\nThere are not enough slots available in the system to satisfy the 4\nslots that\n"
    assert first_words(output) == "There are not enough slots available in the system to satisfy the 4"


def test_a_lost_node_of_an_mpi_job() -> None:
    assert job_result("ORTE has lost communication with a remote daemon.\n")["kind"] == "lost"


# Ray's driver has actors start the program: test_ray.py.
@pytest.mark.parametrize("name", [name for name in LAUNCHER_NAMES if name != "ray"])
def test_every_launcher_starts_the_same_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda command: f"/usr/bin/{command}")
    monkeypatch.setattr("strategies.launch.launchers.mpi.is_open_mpi", lambda: True)
    command = launcher(tmp_path, launcher=name, options=() if name == "local" else ("--an-option",)).command()
    assert command[-1].isdecimal() or command[-1] == str(tmp_path / "launch.json")
    assert "strategies.launch.elastic.nodes" in command if name == "local" else "strategies.launch.rank_main" in command
    if name != "local":
        assert command.index("--an-option") < command.index("strategies.launch.rank_main")


@pytest.mark.parametrize("name", ["slurm", "mpi"])
def test_an_absent_program_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda command: None)
    with pytest.raises(DsplanError, match="is not installed here"):
        launcher(tmp_path, launcher=name).command()


def test_nodes_of_open_mpi_get_the_runs_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda command: f"/usr/bin/{command}")
    monkeypatch.setattr("strategies.launch.launchers.mpi.is_open_mpi", lambda: True)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=2\nnode1 slots=2\n")
    several = {"least_nodes": 2, "most_nodes": 2, "hostfile": str(hostfile)}
    of_nodes = launcher(tmp_path, launcher="mpi", **several)
    command = of_nodes.command()
    assert command[1:5] == ["-np", "4", "--bind-to", "none"]
    exported = {command[at + 1] for at, word in enumerate(command) if word == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTHONSAFEPATH"} <= exported
    assert (of_nodes.environment()["MASTER_ADDR"], of_nodes.environment()["MASTER_PORT"]) == ("node0", "29500")


@pytest.mark.parametrize("text", ["# nodes\n\nnode0 slots=4\nnode1 slots=4\n", "node0:4\nnode1:4\n", "node0\n"])
def test_rank_0_is_on_the_first_host(text: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text)
    several = {"least_nodes": 2, "most_nodes": 2, "hostfile": str(hostfile)}
    assert launcher(tmp_path, launcher="mpi", **several).environment()["MASTER_ADDR"] == "node0"
    hostfile.write_text("# nobody\n")
    with pytest.raises(DsplanError, match="names no host"):
        launcher(tmp_path, launcher="mpi", **several).environment()


@pytest.mark.parametrize(
    ("name", "what"), [("deepspeed", "host file"), ("mpi", "host file"), ("accelerate", "--node-rank")]
)
def test_several_nodes_ask_for_what_they_need(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda command: f"/usr/bin/{command}")
    for job in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(job, raising=False)
    with pytest.raises(DsplanError, match=what):
        launcher(tmp_path, launcher=name, least_nodes=2, most_nodes=2).command()


def test_deepspeed_without_ssh_starts_one_node(tmp_path: Path) -> None:
    several = {"least_nodes": 2, "most_nodes": 2, "hostfile": "hosts", "node_rank": 1}
    command = launcher(tmp_path, launcher="deepspeed", **several).command()
    for words in ("--hostfile=hosts", "--num_nodes=2", "--num_gpus=2", "--no_ssh", "--node_rank=1"):
        assert words in command


def test_deepspeed_on_one_node_leaves_its_usual_port_to_others(tmp_path: Path) -> None:
    command = launcher(tmp_path, launcher="deepspeed", options=("--master_port=29777",)).command()
    ports = [int(word.partition("=")[2]) for word in command if word.startswith("--master_port=")]
    assert ports[-1] == 29777, "what the user asks for comes last and counts"
    with socket.socket() as free:
        free.bind(("", ports[0]))
    assert ports[0] != 29500
