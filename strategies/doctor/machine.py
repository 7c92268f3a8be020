"""What one machine shows by itself: limits of its system, and its GPUs with their driver and libraries. No torch.

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

from hardware_db.files import HOME, data_dir, database_path, read_text
from hardware_db.probe.cgroup import cgroup_limits
from hardware_db.probe.machine import Gpu, Host, Machine, Software
from hardware_db.units import GIB, MIB, format_bytes, format_seconds
from strategies.doctor.finding import Finding

# What the system allows this process.


_ENOUGH_LOCKED = GIB  # of RDMA's registered buffers; its guides ask for "unlimited"
_ENOUGH_SHARED = GIB  # Docker gives 64 MiB
_ENOUGH_FILES = 4096  # NCCL and data workers hold a few per peer and per sample in flight
_LITTLE_DISK, _SCARCE_DISK = 20 * GIB, GIB
_LITTLE_MEMORY = GIB
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p")
_STA_UNSYNC = 0x0040  # linux/timex.h


def limit_findings(host: Host, *, gpus: int) -> list[Finding]:
    """Every limit, for a machine with that many usable GPUs."""
    has_rdma = any(nic.kind in ("infiniband", "roce") for nic in host.nics)
    return [
        locked_memory(_soft(resource.RLIMIT_MEMLOCK), has_rdma=has_rdma),
        *shared_memory(Path("/dev/shm")),
        open_files(_soft(resource.RLIMIT_NOFILE)),
        *control_groups(host, gpus=gpus),
        *disks(),
        *clock(),
    ]


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def locked_memory(limit: int | None, *, has_rdma: bool) -> Finding:
    """RDMA registers its buffers as locked memory; a small limit lets NCCL fail or fall back to TCP."""
    said = "unlimited" if limit is None else format_bytes(limit)
    if limit is None or limit >= _ENOUGH_LOCKED or not has_rdma:
        needless = "" if has_rdma else ", which matters with RDMA, and there is none"
        return Finding(check="memlock", message=f"locked memory: {said}{needless}")
    return Finding(
        level="problem",
        check="memlock",
        message=f"locked memory is limited to {said}, with which NCCL cannot use InfiniBand or RoCE",
        remedy="set `ulimit -l unlimited` (limits.conf; LimitMEMLOCK of slurmd; docker --ulimit memlock=-1)",
    )


def shared_memory(mount: Path) -> list[Finding]:
    """NCCL and data workers exchange through /dev/shm."""
    if not mount.is_dir():
        return []
    free = shutil.disk_usage(mount).free
    if free >= _ENOUGH_SHARED:
        return [Finding(check="shm", message=f"{mount}: {format_bytes(free)} free")]
    return [
        Finding(
            level="problem" if free < 16 * MIB else "warning",
            check="shm",
            message=f"{mount} has {format_bytes(free)} free, and NCCL and data loader workers need more",
            remedy="docker --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium Memory",
        )
    ]


def open_files(limit: int | None) -> Finding:
    """A connection per peer and a descriptor per shared tensor."""
    if limit is None or limit >= _ENOUGH_FILES:
        return Finding(check="files", message=f"open files: {limit or 'unlimited'}")
    return Finding(
        level="warning",
        check="files",
        message=f"a process may open {limit} files, which many ranks or data loader workers exceed",
        remedy="`ulimit -n 65536` before the start",
    )


def control_groups(host: Host, *, gpus: int) -> list[Finding]:
    """Memory and processors that the container or the batch system leaves."""
    limits = cgroup_limits()
    cores = host.usable_cores
    found = []
    if limits.memory_bytes is not None and host.memory_limit_bytes is not None:
        left = limits.memory_left_bytes or 0
        said = f"the control group limits memory to {format_bytes(limits.memory_bytes)}, {format_bytes(left)} left"
        scarce = left < _LITTLE_MEMORY
        remedy = "ask for more (docker --memory, sbatch --mem): above it the kernel kills ranks" if scarce else ""
        found.append(Finding(level="problem" if scarce else "ok", check="memory", message=said, remedy=remedy))
    elif host.memory_available_bytes is not None:
        said = f"{format_bytes(host.memory_available_bytes)} of memory available, no limit by a control group"
        found.append(Finding(check="memory", message=said))
    if cores is not None and cores < gpus:
        found.append(
            Finding(
                level="warning",
                check="cpu",
                message=f"{cores} processor cores for {gpus} GPUs",
                remedy="ask for a core per rank and more for its data workers (sbatch --cpus-per-task)",
            )
        )
    elif cores is not None:
        found.append(Finding(check="cpu", message=f"{cores} of {host.logical_cores} processor cores usable"))
    return found


def disks() -> list[Finding]:
    """Where runs and the database are written."""
    places = {"database": database_path().parent, "runs": data_dir() / "runs"}
    by_disk: dict[tuple[int, bool], dict[str, Path]] = {}
    for name, path in places.items():
        folder = _existing(path)
        by_disk.setdefault((folder.stat().st_dev, os.access(folder, os.W_OK)), {})[name] = folder
    found = []
    for folders in by_disk.values():
        names, folder = " and ".join(folders), next(iter(folders.values()))
        found += [disk(folder, names), *_network_database(folder, names)]
    return found


def disk(folder: Path, names: str) -> Finding:
    """Space and the right to write in one folder."""
    elsewhere = f"set {HOME} to a directory elsewhere"
    if not os.access(folder, os.W_OK):
        return Finding(level="problem", check="disk", message=f"{names}: {folder} cannot be written", remedy=elsewhere)
    free = shutil.disk_usage(folder).free
    said = f"{names}: {format_bytes(free)} free at {folder}"
    if free >= _LITTLE_DISK:
        return Finding(check="disk", message=said)
    return Finding(
        level="problem" if free < _SCARCE_DISK else "warning",
        check="disk",
        message=said,
        remedy=f"checkpoints are large: make room, {elsewhere}, or use --checkpoint-dir",
    )


def _network_database(folder: Path, names: str) -> list[Finding]:
    kind = filesystem(folder)
    if "database" not in names or kind not in _NETWORK_FILESYSTEMS:
        return []
    return [
        Finding(
            level="warning",
            check="disk",
            message=f"the database is on {kind}, whose locks are slow and may fail between nodes",
            remedy=f"set {HOME} to a local directory",
        )
    ]


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def filesystem(path: Path) -> str:
    """The kind of file system a path is on; empty where that is not known."""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in (read_text(Path("/proc/self/mounts")) or "").splitlines():
        _, mount, found, *_ = line.split()
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def clock() -> list[Finding]:
    """Whether something keeps this host's clock right: torch's rendezvous compares clocks of several nodes."""
    state = _kernel_clock()
    if state is None:
        return []
    status, error_seconds = state
    if not status & _STA_UNSYNC:
        return [Finding(check="clock", message=f"synchronised, within {format_seconds(error_seconds)}")]
    return [
        Finding(
            level="warning",
            check="clock",
            message="nothing synchronises this host's clock",
            remedy="start chronyd or systemd-timesyncd where several nodes work together",
        )
    ]


def _kernel_clock() -> tuple[int, float] | None:
    """The status bits of the kernel's clock and its largest error in seconds: adjtimex(2), which changes nothing."""
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
