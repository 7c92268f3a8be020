"""Findings on one machine: each check against a state that is fine and one that is not."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from dsplan.diagnostics.doctor.examine import examine
from dsplan.diagnostics.doctor.finding import Finding, merge_findings, sorted_findings
from dsplan.diagnostics.doctor.machine import (
    check_disk,
    check_gpus,
    check_locked_memory,
    check_open_files,
    check_settings,
    check_shared_memory,
    check_versions,
    limit_findings,
    read_filesystem,
)
from dsplan.diagnostics.doctor.network import gloo_choice, nccl_choice, network_findings
from hardware_db.probe.machine import Gpu, GpuPair, GpuProcess, Host, Machine, Nic, Software
from hardware_db.units import GIB
from strategies.distributed.network import Interface, list_interfaces
from strategies.launch.elastic.place import interface_of

LO, DOCKER = Interface(name="lo", address="127.0.0.1"), Interface(name="docker0", address="172.17.0.1")
ETH, IB = Interface(name="eth0", address="10.0.0.4"), Interface(name="ib0", address="10.1.0.4")


def test_a_directory_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    levels = {
        finding.message: finding.level
        for finding in examine([tmp_path, tmp_path / "none"]).findings
        if finding.check == "shared"
    }
    assert levels[f"{tmp_path / 'none'} cannot be written here"] == "problem"
    assert list(levels.values()).count("ok") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("here", "setting", "chosen"),
    [
        ([LO, DOCKER, ETH, IB], "", "ib0"),
        ([LO, DOCKER, ETH], "", "eth0"),
        ([LO, DOCKER], "", "docker0"),
        ([LO], "", "lo"),
        ([LO, ETH, IB], "eth", "eth0"),
        ([LO, ETH, IB], "=ib", None),
        ([LO, ETH, IB], "=eth0", "eth0"),
        ([LO, ETH, IB], "^ib,lo", "eth0"),
        ([LO, ETH], "ens", None),
    ],
)
def test_nccl_takes_the_interface_that_its_guide_names(here: list[Interface], setting: str, chosen: str | None) -> None:
    choice = nccl_choice(here, {"NCCL_SOCKET_IFNAME": setting} if setting else {})
    assert (choice and choice.name) == chosen


@pytest.mark.parametrize(
    ("addresses", "setting", "chosen"),
    [(["10.0.0.4"], "", "eth0"), (["127.0.1.1"], "", "lo"), ([], "", "lo"), (["10.0.0.4"], "ib0", "ib0")],
)
def test_gloo_takes_the_address_of_the_host_name(addresses: list[str], setting: str, chosen: str) -> None:
    choice = gloo_choice([LO, ETH, IB], addresses, {"GLOO_SOCKET_IFNAME": setting} if setting else {})
    assert choice is not None
    assert choice.name == chosen


def test_an_interface_that_is_not_there_is_a_problem() -> None:
    assert any(interface.address == "127.0.0.1" for interface in list_interfaces())
    assert interface_of("127.0.0.1") == next(item.name for item in list_interfaces() if item.address == "127.0.0.1")
    assert interface_of("203.0.113.9") == ""
    problems = [finding for finding in network_findings({"NCCL_SOCKET_IFNAME": "mlx7"}) if finding.level == "problem"]
    assert [finding.message for finding in problems] == [
        "NCCL_SOCKET_IFNAME is 'mlx7' and no interface that is up has that name"
    ]
    assert not [finding for finding in network_findings({}) if finding.level == "problem"]


@pytest.mark.parametrize(
    ("limit", "has_rdma", "level"),
    [(None, True, "ok"), (2 * GIB, True, "ok"), (65536, True, "problem"), (65536, False, "ok")],
)
def test_locked_memory_matters_with_rdma(limit: int | None, has_rdma: bool, level: str) -> None:
    assert check_locked_memory(limit, has_rdma=has_rdma).level == level


def test_limits_of_this_process_are_read() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        rdma = Host(system="Linux", usable_cores=4, logical_cores=8, nics=(Nic(name="mlx5_0:1", kind="infiniband"),))
        findings = {finding.check: finding for finding in limit_findings(rdma, gpus=8)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert findings["files"].message == "a process may open 512 files, which many ranks or data loader workers exceed"
    assert findings["files"].remedy == "`ulimit -n 65536` before the start"
    assert findings["cpu"].message == "4 processor cores for 8 GPUs"
    assert check_open_files(None).level == check_open_files(1 << 16).level == "ok"


def test_directories_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk(tmp_path, "runs").level in ("ok", "warning")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused = check_disk(tmp_path, "runs")
    assert (refused.level, refused.message) == ("problem", f"runs: {tmp_path} cannot be written")
    assert check_shared_memory(tmp_path / "none") == []
    assert read_filesystem(Path("/proc/self")) == "proc"


GPU = Gpu(index=0, name="H100", total_bytes=80 * GIB, free_bytes=79 * GIB, throttle_reasons=())
HEALTHY = Machine(
    host=Host(system="Linux"),
    software=Software(
        python="3.12.1", driver="570.1", driver_cuda="12.8", torch_cuda="12.6", packages=(("torch", "2.6.0"),)
    ),
    gpus=(GPU,),
)


def test_a_healthy_gpu_is_fine() -> None:
    findings = [*check_versions(HEALTHY), *check_gpus(HEALTHY)]
    assert {finding.level for finding in findings} == {"ok"}
    assert findings[-1].message == "1 of 1 GPUs usable: H100"


@pytest.mark.parametrize(
    ("change", "level", "message"),
    [
        ({"lost": True}, "problem", "GPU 0 does not answer"),
        ({"ecc_uncorrected_errors": 3}, "problem", "GPU 0 has 3 uncorrected memory errors"),
        ({"throttle_reasons": ("power cap",)}, "warning", "GPU 0 is held back by power cap"),
        ({"mig_enabled": True}, "warning", "GPU 0 is cut into MIG slices"),
        ({"processes": (GpuProcess(pid=7),)}, "warning", "GPU 0 is shared with process 7"),
        ({"pcie_width": 8, "pcie_width_max": 16}, "warning", "GPU 0 has 8 of 16 PCIe lanes"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_reported(change: dict[str, object], level: str, message: str) -> None:
    broken = Gpu(**{"index": 0, "name": "H100", "total_bytes": 80 * GIB, "free_bytes": GIB, **change})  # type: ignore[arg-type]
    machine = Machine(host=HEALTHY.host, software=HEALTHY.software, gpus=(broken,))
    first = check_gpus(machine)[0]
    assert (first.level, first.message) == (level, message)
    assert first.remedy


@pytest.mark.parametrize(
    ("software", "message"),
    [
        (Software(python="3.12"), "torch is not installed, and a run needs it"),
        (Software(python="3.12", torch_cuda="cpu", packages=(("torch", "2.6.0"),)), "torch is built without CUDA"),
        (
            Software(
                python="3.12", driver="535", driver_cuda="12.2", torch_cuda="13.0", packages=(("torch", "2.11.0"),)
            ),
            "driver 535 serves CUDA 12.2, torch is built for 13.0",
        ),
    ],
)
def test_a_torch_that_does_not_fit_is_a_problem(software: Software, message: str) -> None:
    last = check_versions(Machine(host=HEALTHY.host, software=software, gpus=(GPU,)))[-1]
    assert last.level == "problem"
    assert message in last.message
    assert last.remedy


def test_gpus_without_peer_copies_are_named() -> None:
    pairs = (GpuPair(first=0, second=1, p2p="chipset not supported"), GpuPair(first=0, second=2, p2p="ok"))
    findings = check_gpus(Machine(host=HEALTHY.host, software=HEALTHY.software, gpus=(GPU,), pairs=pairs))
    assert findings[0].message == "GPUs cannot copy to each other directly: 0-1 (chipset not supported)"


def test_settings_that_slow_down_are_named() -> None:
    findings = check_settings(
        {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    )
    assert [finding.message.split("=")[0] for finding in findings] == [
        "CUDA_LAUNCH_BLOCKING",
        "TORCH_DISTRIBUTED_DEBUG",
    ]


def test_findings_that_nodes_share_are_one_line_and_problems_come_first() -> None:
    fine, bad = Finding(check="a", message="fine"), Finding(level="problem", check="b", message="bad", remedy="mend it")
    several = [Finding(check="a", message="fine", hosts=(host,)) for host in ("x", "y")]
    assert merge_findings(several) == [Finding(check="a", message="fine", hosts=("x", "y"))]
    assert sorted_findings([fine, bad]) == (bad, fine)
    assert bad.line == "bad; mend it"
    assert Finding.from_dict(several[0].to_dict()) == several[0]
