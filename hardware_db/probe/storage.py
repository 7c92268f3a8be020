"""Disks and network adapters as Linux lists them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hardware_db.probe.files import children, read_int, read_text
from hardware_db.probe.machine import Disk, Nic

_READ_ONLY_IMAGES = frozenset({"squashfs", "iso9660", "erofs"})


def probe_disks(root: Path = Path("/")) -> tuple[Disk, ...]:
    """Every mounted file system that lies on a block device (or is the root), each device once."""
    found: dict[str, Disk] = {}
    for line in (read_text(root / "proc/self/mounts") or "").splitlines():
        device, mount, filesystem, *_ = [_unescape(word) for word in line.split()]
        real = device.startswith("/dev/") or mount == "/"
        if not real or filesystem in _READ_ONLY_IMAGES or device in found:
            continue
        space = _space(root / mount.lstrip("/"))
        if space is not None:
            kind = _kind(root, device)
            found[device] = Disk(
                mount=mount, device=device, filesystem=filesystem, total_bytes=space[0], free_bytes=space[1], kind=kind
            )
    return tuple(found.values())


def probe_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """Active RDMA ports, and physical Ethernet adapters that are up."""
    return (*_rdma_ports(root / "sys/class/infiniband"), *_ethernet(root / "sys/class/net"))


def _unescape(word: str) -> str:
    """Spaces in the mount table are written as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _space(mount: Path) -> tuple[int, int] | None:
    """Total bytes, and those an ordinary user may still write."""
    try:
        state = os.statvfs(mount)
    except OSError:
        return None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _kind(root: Path, device: str) -> str | None:
    """nvme, ssd or hdd. Virtual disks are None: the kernel sees only the virtual one, not what is under it."""
    name = Path(device).name
    block = root / "sys/class/block" / name
    for disk in (block, block.resolve().parent, *children(block / "slaves")):
        if disk.name.startswith("nvme"):
            return "nvme"
        if disk.name.startswith(("vd", "xvd")):
            return None
        rotational = read_int(disk / "queue/rotational")
        if rotational is not None and not name.startswith(("dm-", "mapper", "loop")):
            return "hdd" if rotational else "ssd"
    return None


def _rdma_ports(folder: Path) -> list[Nic]:
    ports = []
    for port in (port for adapter in children(folder) for port in children(adapter / "ports")):
        if "ACTIVE" not in (read_text(port / "state") or ""):
            continue
        rate = re.match(r"([\d.]+) Gb/sec", read_text(port / "rate") or "")
        kind = "infiniband" if read_text(port / "link_layer") == "InfiniBand" else "roce"
        name = f"{port.parent.parent.name}:{port.name}"
        ports.append(Nic(name=name, kind=kind, gbit=float(rate[1]) if rate else None))
    return ports


def _ethernet(folder: Path) -> list[Nic]:
    adapters = []
    for adapter in children(folder):
        if read_text(adapter / "operstate") != "up" or not (adapter / "device").exists():
            continue
        megabit = read_int(adapter / "speed")  # -1 where a virtual adapter has no rate
        gbit = megabit / 1000 if megabit and megabit > 0 else None
        adapters.append(Nic(name=adapter.name, kind="ethernet", gbit=gbit))
    return adapters
