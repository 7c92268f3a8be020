"""GPUs, their driver, and the libraries that must fit them; variables that make a training slow. No torch imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hardware_db.probe.machine import Gpu, Machine, Software
from strategies.doctor.finding import Finding

_SLOW: dict[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through host memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a node talk through the network"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is allocated by the driver"),
    "NCCL_DEBUG": ("TRACE", "every call is written down"),
}


def software_findings(machine: Machine, variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Versions, drivers, the state of every GPU, and slow settings."""
    return [*versions(machine), *gpus(machine), *slow_settings(variables)]


def versions(machine: Machine) -> list[Finding]:
    """The libraries that a run needs, and whether torch fits the driver."""
    software = machine.software
    torch = software.version("torch")
    if torch is None:
        return [
            Finding(
                level="problem",
                check="torch",
                message="torch is not installed, and a run needs it",
                remedy="pip install 'dsplan[train]'",
            )
        ]
    parts = [f"{name} {version}" for name, version in software.packages]
    said = f"python {software.python}, {', '.join(parts)}, torch built for {software.torch_cuda or 'an unknown device'}"
    return [Finding(check="software", message=said), *_driver(machine, software)]


def _driver(machine: Machine, software: Software) -> list[Finding]:
    nvidia = [gpu for gpu in machine.gpus if gpu.vendor == "nvidia"]
    if not nvidia:
        return []
    if software.torch_cuda == "cpu":
        return [
            Finding(
                level="problem",
                check="torch",
                message=f"{len(nvidia)} GPUs are here and torch is built without CUDA",
                remedy="install torch for CUDA: https://pytorch.org/get-started/locally",
            )
        ]
    built, served = _major(software.torch_cuda), _major(software.driver_cuda)
    said = f"driver {software.driver} serves CUDA {software.driver_cuda}, torch is built for {software.torch_cuda}"
    if built is None or served is None or built <= served:
        return [Finding(check="driver", message=said)]
    return [
        Finding(
            level="problem",
            check="driver",
            message=said,
            remedy="install a newer driver, or torch for an older CUDA",
        )
    ]


def _major(version: str | None) -> int | None:
    found = re.match(r"(\d+)", version or "")
    return int(found[1]) if found else None


def gpus(machine: Machine) -> list[Finding]:
    """GPUs that do not answer, are held back, hidden, shared or faulty."""
    if not machine.gpus:
        return [Finding(check="gpu", message="no GPU found: ranks train on the CPU, over gloo")]
    found = [finding for gpu in machine.gpus for finding in _gpu(gpu)]
    blocked = [pair for pair in machine.pairs if pair.p2p not in (None, "ok")]
    if blocked:
        names = ", ".join(f"{pair.first}-{pair.second} ({pair.p2p})" for pair in blocked[:6])
        found.append(
            Finding(
                level="warning",
                check="gpu",
                message=f"GPUs cannot copy to each other directly: {names}{' ...' if len(blocked) > 6 else ''}",
                remedy="look at ACS in the BIOS and at `nvidia-smi topo -p2p r`; NCCL goes through host memory",
            )
        )
    usable = machine.usable_gpus
    names = ", ".join(dict.fromkeys(gpu.name for gpu in usable))
    return [*found, Finding(check="gpu", message=f"{len(usable)} of {len(machine.gpus)} GPUs usable: {names}")]


def _gpu(gpu: Gpu) -> list[Finding]:
    found: list[tuple[bool, str, str]] = []
    name = f"GPU {gpu.index}"
    if gpu.lost:
        found.append((True, f"{name} does not answer", "reset it or restart the machine; `dmesg` has the Xid"))
    if gpu.ecc_uncorrected_errors:
        errors = f"{name} has {gpu.ecc_uncorrected_errors} uncorrected memory errors"
        found.append((True, errors, "reset it, and have it replaced if they come back"))
    if gpu.throttle_reasons:
        why = ", ".join(gpu.throttle_reasons)
        found.append((False, f"{name} is held back by {why}", "look at cooling, power limit and locked clocks"))
    if gpu.mig_enabled:
        found.append((False, f"{name} is cut into MIG slices", "a rank needs a whole GPU: `nvidia-smi -mig 0`"))
    if gpu.processes:
        who = ", ".join(str(process.pid) for process in gpu.processes)
        found.append((False, f"{name} is shared with process {who}", "end it, or hide the GPU: CUDA_VISIBLE_DEVICES"))
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        lanes = f"{name} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
        found.append((False, lanes, "reseat it: transfers to the host are slower by that"))
    return [
        Finding(level="problem" if is_bad else "warning", check="gpu", message=message, remedy=remedy)
        for is_bad, message, remedy in found
    ]


def slow_settings(variables: Mapping[str, str]) -> list[Finding]:
    """Variables of debugging that somebody left set."""
    return [
        Finding(
            level="warning", check="settings", message=f"{name}={value}: {effect}", remedy=f"unset {name} to train fast"
        )
        for name, (value, effect) in _SLOW.items()
        if variables.get(name, "").upper() == value
    ]
