"""The device of a run is decided once, in the command, and its ranks hold to it or say why they cannot."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardware_db.errors import DsplanError
from hardware_db.probe import Gpu, GpuProcess, Host, Machine, MigDevice, Software
from hardware_db.probe.software import mark_visibility
from planner.cluster.probed import mig_cluster
from strategies.distributed import environment
from strategies.launch import device as device_module
from strategies.launch.device import ask_torch, decide
from strategies.run_directory import machine as machine_module
from strategies.run_directory.machine import own_machine
from strategies.run_directory.request import ON_CPU, DecidedDevice, PlanRequest
from strategies.run_directory.spec import Placement
from strategies.supervision.failures import failure_of
from strategies.variables import REQUEST, RUN_DIRECTORY

LOCAL = Placement()
MIG = MigDevice(name="H100 MIG 1g.10gb", uuid="MIG-1", total_bytes=10, free_bytes=9)
LARGER_MIG = MigDevice(name="H100 MIG 3g.40gb", uuid="MIG-3", total_bytes=40, free_bytes=30)


def _gpu(index: int, **facts: Any) -> Gpu:
    return Gpu(**{"index": index, "name": "H100", "uuid": f"GPU-{index}", "total_bytes": 80, "free_bytes": 79, **facts})


def _machine(*gpus: Gpu, torch_cuda: str | None = "13.0", messages: tuple[str, ...] = ()) -> Machine:
    software = Software(python="3.11", torch_cuda=torch_cuda, packages=(("torch", "2.9.0"),))
    return Machine(host=Host(system="Linux"), software=software, gpus=gpus, messages=messages)


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cuda_library_loads", lambda: False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def test_all_gpus_that_are_alike_are_taken_as_they_are() -> None:
    decision = decide(_machine(_gpu(0), _gpu(1)), LOCAL)
    assert (decision.device, decision.gpus) == (DecidedDevice(gpus=2, name="H100"), 2)
    assert (decision.variables, decision.notice) == ({}, "")


@pytest.mark.parametrize("missing", [{"lost": True}, {"mig_enabled": True, "mig_devices": (MIG,)}])
def test_ranks_are_shown_the_gpus_that_are_planned_for(missing: dict[str, Any]) -> None:
    decision = decide(_machine(_gpu(0), _gpu(1, **missing), _gpu(2)), LOCAL)
    assert decision.gpus == 2
    assert decision.variables == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-2"}


def test_gpus_that_the_user_has_hidden_stay_so() -> None:
    decision = decide(_machine(_gpu(0), _gpu(1, visible=False)), LOCAL)
    assert (decision.gpus, decision.variables) == (1, {})


def test_unequal_gpus_are_numbered_as_the_driver_numbers_them() -> None:
    """CUDA's own order begins with the fastest, so that rank 0's would be another GPU than the first that is listed."""
    unequal = _machine(_gpu(0, name="RTX 3090"), _gpu(1, name="RTX 4090"))
    assert decide(unequal, LOCAL).variables == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_the_largest_mig_slice_is_the_device_of_one_rank() -> None:
    machine = _machine(_gpu(0, mig_enabled=True, mig_devices=(MIG, LARGER_MIG)))
    decision = decide(machine, LOCAL)
    assert decision.device == DecidedDevice(gpus=1, name="H100 MIG 3g.40gb")
    assert decision.variables == {"CUDA_VISIBLE_DEVICES": "MIG-3"}
    shown = replace(machine, gpus=mark_visibility(machine.gpus, {"CUDA_VISIBLE_DEVICES": "MIG-1"}))
    cluster = mig_cluster(shown)
    assert cluster is not None
    assert (cluster.device.name, cluster.capacity_bytes) == (MIG.name, MIG.free_bytes)


def test_without_a_gpu_ranks_see_none() -> None:
    decision = decide(_machine(), LOCAL)
    assert decision.device == DecidedDevice(gpus=0)
    assert decision.variables == {**ON_CPU, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("placement", "decides"),
    [
        (Placement(launcher="slurm"), False),
        (Placement(launcher="mpi", hostfile="hosts"), False),
        (Placement(launcher="mpi"), True),
        (Placement(launcher="deepspeed", most_nodes=2, hostfile="hosts"), False),
        (Placement(launcher="deepspeed", most_nodes=2, hostfile="hosts", node_rank=0), True),
        (Placement(most_nodes=2, rendezvous="a:1"), True),
    ],
)
def test_a_node_that_only_starts_others_decides_nothing_for_them(placement: Placement, decides: bool) -> None:
    """A login node has no GPU, and the nodes of its job do: they were told to train on the CPU."""
    decision = decide(_machine(), placement)
    assert (decision.device is not None, bool(decision.variables)) == (decides, decides)


def test_a_build_of_torch_for_the_cpu_is_refused_beside_gpus() -> None:
    with pytest.raises(DsplanError) as caught:
        decide(_machine(_gpu(0), torch_cuda="cpu"), LOCAL)
    assert str(caught.value) == (
        "1 x H100 are here and torch 2.9.0 is built for the CPU alone; install torch for CUDA"
        " (https://pytorch.org/get-started/locally), or train on the CPU: CUDA_VISIBLE_DEVICES= dsplan run"
    )
    assert decide(_machine(_gpu(0, visible=False), torch_cuda="cpu"), LOCAL).gpus == 0


def test_torch_is_asked_where_no_library_lists_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = (Gpu(index=0, name="H100", total_bytes=80, free_bytes=79, used_bytes=1, compute_capability="9.0"),)
    monkeypatch.setattr(device_module, "cuda_library_loads", lambda: True)
    monkeypatch.setattr(device_module, "ask_torch", lambda: seen)
    nothing = _machine(messages=("no NVML here",))
    decision = decide(nothing, LOCAL)
    assert (decision.gpus, decision.machine.gpus) == (1, seen)
    assert decision.notice == "torch sees 1 x H100, which the run takes though no driver lists them: no NVML here"
    handed = PlanRequest(device=decision.device).to_variables()
    assert PlanRequest.of(handed).device == decision.device
    monkeypatch.setattr(machine_module, "probe", lambda: nothing)
    assert own_machine(handed).usable_gpus == seen
    assert own_machine({}) == nothing


def test_torch_is_not_asked_without_a_driver_or_where_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "ask_torch", lambda: pytest.fail("torch was asked"))
    assert decide(_machine(), LOCAL).gpus == 0
    monkeypatch.setattr(device_module, "cuda_library_loads", lambda: True)
    assert decide(_machine(_gpu(0, visible=False)), LOCAL).gpus == 0


@pytest.mark.parametrize("answer", ["", "Segmentation fault", '[]\n{"no": "list"'])
def test_a_torch_that_does_not_answer_sees_nothing(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = subprocess.CompletedProcess([], 0, stdout=answer)
    monkeypatch.setattr(device_module.subprocess, "run", lambda *arguments, **options: finished)
    assert ask_torch() == ()


def test_what_the_ranks_of_a_run_hold_is_free_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script puts its model on the GPU before dsplan plans, and a plan counts the model's bytes itself."""
    shared = (GpuProcess(pid=11, used_bytes=30), GpuProcess(pid=12, used_bytes=8))
    gpu = _gpu(0, free_bytes=40, used_bytes=40, processes=shared)
    monkeypatch.setattr(machine_module, "probe", lambda: _machine(gpu, _gpu(1, used_bytes=1)))
    (tmp_path / "rank0.pid").write_text("11")
    (tmp_path / "rank1.pid").write_text("")
    first, second = own_machine({RUN_DIRECTORY: str(tmp_path)}).gpus
    assert (first.free_bytes, first.used_bytes, first.processes) == (70, 10, shared[1:])
    assert (second.free_bytes, second.used_bytes) == (79, 1)
    assert own_machine({}).gpus[0] == gpu


# The rank's side.


def _sees(monkeypatch: pytest.MonkeyPatch, visible: int, decided: DecidedDevice | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv(REQUEST, PlanRequest(device=decided).to_variables().get(REQUEST, ""))


def test_a_rank_trains_on_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(monkeypatch, 2, DecidedDevice(gpus=2, name="H100"))
    assert environment.device_name(1) == ("cuda:1", "")
    _sees(monkeypatch, 2, DecidedDevice(gpus=0))
    assert environment.device_name(1) == ("cpu", "")
    _sees(monkeypatch, 0, None)
    assert environment.device_name(1) == ("cpu", "")


def test_a_rank_says_which_gpu_it_lacks_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "n1")
    _sees(monkeypatch, 1, DecidedDevice(gpus=2, name="H100"))
    assert environment.device_name(0) == ("cuda:0", "")
    device, complaint = environment.device_name(1)
    assert (device, complaint) == (
        "cuda:1",
        "local rank 1 on n1 has no GPU: the driver lists 2 x H100, and torch sees 1 of them; start 1 with --nproc 1,"
        " or `dsplan doctor` to see what the others lack",
    )
    _sees(monkeypatch, 0, DecidedDevice(gpus=2, name="H100"))
    monkeypatch.setattr(environment, "_refusal", lambda: "Found no NVIDIA driver on your system")
    _, complaint = environment.device_name(0)
    assert complaint == (
        f"local rank 0 on n1 has no GPU: the driver lists 2 x H100, and torch {torch.__version__} sees none (Found no"
        " NVIDIA driver on your system); install torch for this driver (`dsplan doctor`), or train on the CPU:"
        " CUDA_VISIBLE_DEVICES= dsplan run"
    )


def test_a_lone_rank_says_it_too_and_nobody_blames_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _sees(monkeypatch, 0, DecidedDevice(gpus=1, name="H100"))
    with pytest.raises(DsplanError, match="has no GPU: the driver lists 1 x H100") as caught:
        environment.meet_before_script()
    assert failure_of(caught.value, tmp_path).message == str(caught.value)
    about_torch = DsplanError("local rank 0 has no GPU: torch sees none (No CUDA GPUs are available)")
    assert failure_of(about_torch, tmp_path).message == str(about_torch)


def test_a_rank_on_the_cpu_tells_the_libraries_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no command has decided: its node may be another than that of the command."""
    variables = {"DS_ACCELERATOR": "theirs"}
    _sees(monkeypatch, 0, None)
    monkeypatch.setattr(environment.os, "environ", variables)
    environment.meet_before_script()
    assert variables == {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "theirs"}
