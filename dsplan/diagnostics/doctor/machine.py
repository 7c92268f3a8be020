"""The checks of one machine by itself: limits of its system, its GPUs with their driver and libraries. No torch.

The limits are locked and shared memory, open files, control groups, disks and the clock. With the libraries come
variables that make a training slow.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from dsplan.diagnostics.doctor.finding import Finding
from hardware_db.files import HOME, database_path, read_text, runs_dir
from hardware_db.probe import NO_GPU
from hardware_db.probe.cgroup import cgroup_limits
from hardware_db.probe.machine import Gpu, Host, Machine, Software
from hardware_db.units import GIB, MIB, format_bytes, format_seconds
from planner.cluster.probed import largest_slice

# What the system allows this process.
_ENOUGH_LOCKED = GIB  # of RDMA's registered buffers; its guides ask for "unlimited"
_ENOUGH_SHARED, _NO_SHARED = GIB, 16 * MIB  # Docker gives 64 MiB
_ENOUGH_FILES = 4096  # NCCL and data workers hold a few per peer and per sample in flight
_LITTLE_DISK, _SCARCE_DISK = 20 * GIB, GIB
_LITTLE_MEMORY = GIB
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p")
_STA_UNSYNC = 0x0040  # linux/timex.h


def limit_findings(host: Host, *, gpus: int) -> list[Finding]:
    """Check every limit, for a machine with that many usable GPUs."""
    has_rdma = any(nic.kind in ("infiniband", "roce") for nic in host.nics)
    return [
        check_locked_memory(_soft_limit(resource.RLIMIT_MEMLOCK), has_rdma=has_rdma),
        *check_shared_memory(Path("/dev/shm")),
        check_open_files(_soft_limit(resource.RLIMIT_NOFILE)),
        *check_control_groups(host, gpus=gpus),
        *check_disks(),
        *check_clock(),
    ]


def _soft_limit(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def check_locked_memory(limit: int | None, *, has_rdma: bool) -> Finding:
    """Check the limit of locked memory: RDMA has its buffers there, without which NCCL fails or falls back to TCP."""
    allowed = "unlimited" if limit is None else format_bytes(limit)
    if limit is None or limit >= _ENOUGH_LOCKED or not has_rdma:
        needless = "" if has_rdma else ", which matters with RDMA, and there is none"
        return Finding(check="memlock", message=f"locked memory: {allowed}{needless}")
    return Finding.problem(
        "memlock",
        f"locked memory is limited to {allowed}, with which NCCL cannot use InfiniBand or RoCE",
        "set `ulimit -l unlimited` (limits.conf; LimitMEMLOCK of slurmd; docker --ulimit memlock=-1)",
    )


def check_shared_memory(mount: Path) -> list[Finding]:
    """Check /dev/shm, through which NCCL and data workers exchange."""
    if not mount.is_dir():
        return []
    free = shutil.disk_usage(mount).free
    if free >= _ENOUGH_SHARED:
        return [Finding(check="shm", message=f"{mount}: {format_bytes(free)} free")]
    report = Finding.problem if free < _NO_SHARED else Finding.warning
    message = f"{mount} has {format_bytes(free)} free, and NCCL and data loader workers need more"
    return [report("shm", message, "docker --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium Memory")]


def check_open_files(limit: int | None) -> Finding:
    """Check the limit of open files: a connection per peer and a descriptor per shared tensor."""
    if limit is None or limit >= _ENOUGH_FILES:
        return Finding(check="files", message=f"open files: {limit or 'unlimited'}")
    return Finding.warning(
        "files",
        f"a process may open {limit} files, which many ranks or data loader workers exceed",
        "`ulimit -n 65536` before the start",
    )


def check_control_groups(host: Host, *, gpus: int) -> list[Finding]:
    """Check the memory and the processors that the container or the batch system leaves."""
    limits = cgroup_limits()
    cores = host.usable_cores
    findings = []
    if limits.memory_bytes is not None and host.memory_limit_bytes is not None:
        left = limits.memory_left_bytes or 0
        message = f"the control group limits memory to {format_bytes(limits.memory_bytes)}, {format_bytes(left)} left"
        scarce = left < _LITTLE_MEMORY
        remedy = "ask for more (docker --memory, sbatch --mem): above it the kernel kills ranks" if scarce else ""
        findings.append(Finding(level="problem" if scarce else "ok", check="memory", message=message, remedy=remedy))
    elif host.memory_available_bytes is not None:
        message = f"{format_bytes(host.memory_available_bytes)} of memory available, no limit by a control group"
        findings.append(Finding(check="memory", message=message))
    if cores is not None and cores < gpus:
        findings.append(
            Finding.warning(
                "cpu",
                f"{cores} processor cores for {gpus} GPUs",
                "ask for a core per rank and more for its data workers (sbatch --cpus-per-task)",
            )
        )
    elif cores is not None:
        findings.append(Finding(check="cpu", message=f"{cores} of {host.logical_cores} processor cores usable"))
    return findings


def check_disks() -> list[Finding]:
    """Check the disks on which runs and the database are written."""
    by_disk: dict[tuple[int, bool], dict[str, Path]] = {}
    for name, path in {"database": database_path().parent, "runs": runs_dir()}.items():
        folder = next(folder for folder in (path, *path.parents) if folder.exists())
        by_disk.setdefault((folder.stat().st_dev, os.access(folder, os.W_OK)), {})[name] = folder
    findings = []
    for folders in by_disk.values():
        names, folder = " and ".join(folders), next(iter(folders.values()))
        findings += [check_disk(folder, names), *_check_network_database(folder, names)]
    return findings


def check_disk(folder: Path, names: str) -> Finding:
    """Check space and the right to write in one folder."""
    elsewhere = f"set {HOME} to a directory elsewhere"
    if not os.access(folder, os.W_OK):
        return Finding.problem("disk", f"{names}: {folder} cannot be written", elsewhere)
    free = shutil.disk_usage(folder).free
    message = f"{names}: {format_bytes(free)} free at {folder}"
    if free >= _LITTLE_DISK:
        return Finding(check="disk", message=message)
    report = Finding.problem if free < _SCARCE_DISK else Finding.warning
    return report("disk", message, f"checkpoints are large: make room, {elsewhere}, or use --checkpoint-dir")


def _check_network_database(folder: Path, names: str) -> list[Finding]:
    kind = read_filesystem(folder)
    if "database" not in names or kind not in _NETWORK_FILESYSTEMS:
        return []
    return [
        Finding.warning(
            "disk",
            f"the database is on {kind}, whose locks are slow and may fail between nodes",
            f"set {HOME} to a local directory",
        )
    ]


def read_filesystem(path: Path) -> str:
    """Return the kind of file system a path is on; empty where that is not known."""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in (read_text(Path("/proc/self/mounts")) or "").splitlines():
        _, mount, mounted, *_ = line.split()
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, mounted
    return kind


def check_clock() -> list[Finding]:
    """Check that something keeps this host's clock right: torch's rendezvous compares clocks of several nodes."""
    state = _read_kernel_clock()
    if state is None:
        return []
    status, error_seconds = state
    if not status & _STA_UNSYNC:
        return [Finding(check="clock", message=f"synchronised, within {format_seconds(error_seconds)}")]
    return [
        Finding.warning(
            "clock",
            "nothing synchronises this host's clock",
            "start chronyd or systemd-timesyncd where several nodes work together",
        )
    ]


def _read_kernel_clock() -> tuple[int, float] | None:
    """Read the status bits of the kernel's clock and its largest error in seconds with adjtimex(2)."""
    if not sys.platform.startswith("linux") or struct.calcsize("P") != 8:
        return None
    timex = ctypes.create_string_buffer(256)
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
            return None
    except (OSError, AttributeError):
        return None
    # struct timex of a 64-bit Linux: modes, offset, freq, maxerror (microseconds), esterror, status.
    _, _, _, error, _, status = struct.unpack_from("i4xqqqqi", timex.raw)
    return status, error / 1e6


# GPUs, their driver, and the libraries that must fit them; variables that make a training slow.
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
    """Check versions, drivers, the state of every GPU, and slow settings."""
    return [*check_versions(machine), *check_gpus(machine), *check_settings(variables)]


def check_versions(machine: Machine) -> list[Finding]:
    """Check the libraries that a run needs, and whether torch fits the driver."""
    software = machine.software
    torch = software.version("torch")
    if torch is None:
        return [Finding.problem("torch", "torch is not installed, and a run needs it", "pip install 'dsplan[train]'")]
    parts = [f"{name} {version}" for name, version in software.packages]
    torch_device = software.torch_cuda or "an unknown device"
    message = f"python {software.python}, {', '.join(parts)}, torch built for {torch_device}"
    return [Finding(check="software", message=message), *_check_driver(machine, software)]


def _check_driver(machine: Machine, software: Software) -> list[Finding]:
    nvidia = [gpu for gpu in machine.gpus if gpu.vendor == "nvidia"]
    if not nvidia:
        return []
    if software.torch_cuda == "cpu":
        return [
            Finding.problem(
                "torch",
                f"{len(nvidia)} GPUs are here and torch is built without CUDA",
                "install torch for CUDA: https://pytorch.org/get-started/locally",
            )
        ]
    built, served = _major(software.torch_cuda), _major(software.driver_cuda)
    message = f"driver {software.driver} serves CUDA {software.driver_cuda}, torch is built for {software.torch_cuda}"
    if built is None or served is None or built <= served:
        return [Finding(check="driver", message=message)]
    return [Finding.problem("driver", message, "install a newer driver, or torch for an older CUDA")]


def _major(version: str | None) -> int | None:
    digits = re.match(r"\d+", version or "")
    return int(digits[0]) if digits else None


def check_gpus(machine: Machine) -> list[Finding]:
    """Check for GPUs that do not answer, are held back, hidden, shared or faulty."""
    if not machine.gpus:
        return [_explain_absence(machine)]
    findings = [finding for gpu in machine.gpus for finding in _check_gpu(gpu)]
    blocked = [pair for pair in machine.pairs if pair.p2p not in (None, "ok")]
    if blocked:
        names = ", ".join(f"{pair.first}-{pair.second} ({pair.p2p})" for pair in blocked[:6])
        findings.append(
            Finding.warning(
                "gpu",
                f"GPUs cannot copy to each other directly: {names}{' ...' if len(blocked) > 6 else ''}",
                "look at ACS in the BIOS and at `nvidia-smi topo -p2p r`; NCCL goes through host memory",
            )
        )
    usable, part = machine.usable_gpus, largest_slice(machine)
    names = ", ".join(dict.fromkeys(gpu.name for gpu in usable))
    instead = "ranks train on the CPU, over gloo" if part is None else f"one rank trains on the slice {part.name}"
    message = f"{len(usable)} of {len(machine.gpus)} GPUs usable: {names or instead}"
    return [*findings, Finding(check="gpu", message=message)]


def _explain_absence(machine: Machine) -> Finding:
    """Report that there is no GPU, or that there is a driver whose library cannot be asked for them."""
    message, _, remedy = next(iter(machine.messages), NO_GPU).partition("; ")
    if message == NO_GPU:
        return Finding(check="gpu", message=f"{NO_GPU}: ranks train on the CPU, over gloo")
    return Finding.problem("gpu", message, remedy or "look at `nvidia-smi`")


def _check_gpu(gpu: Gpu) -> list[Finding]:
    findings: list[Finding] = []
    name = f"GPU {gpu.index}"
    if gpu.lost:
        findings.append(
            Finding.problem("gpu", f"{name} does not answer", "reset it or restart the machine; `dmesg` has the Xid")
        )
    if gpu.ecc_uncorrected_errors:
        errors = f"{name} has {gpu.ecc_uncorrected_errors} uncorrected memory errors"
        findings.append(Finding.problem("gpu", errors, "reset it, and have it replaced if they come back"))
    if gpu.throttle_reasons:
        why = ", ".join(gpu.throttle_reasons)
        findings.append(
            Finding.warning("gpu", f"{name} is held back by {why}", "look at cooling, power limit and locked clocks")
        )
    if gpu.mig_enabled:
        findings.append(
            Finding.warning(
                "gpu", f"{name} is cut into MIG slices", "a slice holds one rank; for more `nvidia-smi -mig 0`"
            )
        )
    if gpu.processes:
        who = ", ".join(str(process.pid) for process in gpu.processes)
        findings.append(
            Finding.warning(
                "gpu", f"{name} is shared with process {who}", "end it, or hide the GPU: CUDA_VISIBLE_DEVICES"
            )
        )
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        lanes = f"{name} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
        findings.append(Finding.warning("gpu", lanes, "reseat it: transfers to the host are slower by that"))
    return findings


def check_settings(variables: Mapping[str, str]) -> list[Finding]:
    """Check for variables of debugging that somebody left set."""
    return [
        Finding.warning("settings", f"{name}={value}: {effect}", f"unset {name} to train fast")
        for name, (value, effect) in _SLOW.items()
        if variables.get(name, "").upper() == value
    ]
