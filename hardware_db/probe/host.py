"""The host: processor, memory, disks, network. Reads /proc and /sys (sysctl on macOS) and needs no package."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from hardware_db.files import children, read_int, read_text
from hardware_db.probe.cgroup import cgroup_limits, usable_cores
from hardware_db.probe.machine import Disk, Host, Nic
from hardware_db.units import KIB

# Disks and network adapters as Linux lists them.


_READ_ONLY_IMAGES = frozenset({"squashfs", "iso9660", "erofs"})


def probe_disks(root: Path = Path("/")) -> tuple[Disk, ...]:
    """Every mounted file system that lies on a block device (or is the root), each device once."""
    disks: dict[str, Disk] = {}
    for line in (read_text(root / "proc/self/mounts") or "").splitlines():
        device, mount, filesystem, *_ = [_unescape(word) for word in line.split()]
        real = device.startswith("/dev/") or mount == "/"
        if not real or filesystem in _READ_ONLY_IMAGES or device in disks:
            continue
        space = _space(root / mount.lstrip("/"))
        if space is not None:
            kind = _kind(root, device)
            disks[device] = Disk(
                mount=mount, device=device, filesystem=filesystem, total_bytes=space[0], free_bytes=space[1], kind=kind
            )
    return tuple(disks.values())


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


def probe_host(root: Path = Path("/")) -> Host:
    """Return the part of the host that this process may use; /proc and /sys are looked for under `root`."""
    if sys.platform == "darwin":
        return _macos_host()
    if not (root / "proc/meminfo").exists():
        return Host(
            system=_system(),
            cpu_model=platform.processor() or None,
            logical_cores=os.cpu_count(),
            usable_cores=usable_cores(),
        )
    return _linux_host(root)


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _linux_host(root: Path) -> Host:
    blocks = _cpu_blocks(root)
    first = blocks[0] if blocks else {}
    limits = cgroup_limits(root)
    memory = _meminfo(root)
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    left = [size for size in (available, limits.memory_left_bytes) if size is not None]
    logical = len(blocks) or os.cpu_count() or 1
    return Host(
        system=_system(),
        cpu_model=first.get("model name") or first.get("Processor") or platform.machine(),
        cpu_flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        cpu_max_mhz=_max_mhz(root, blocks),
        physical_cores=_physical_cores(root, blocks) or logical,
        logical_cores=logical,
        usable_cores=min(logical, usable_cores(limits)),
        memory_total_bytes=total,
        memory_available_bytes=min(left, default=None),
        memory_limit_bytes=limits.memory_bytes if total is None or (limits.memory_bytes or total) < total else None,
        disks=probe_disks(root),
        nics=probe_nics(root),
    )


def _cpu_blocks(root: Path) -> list[dict[str, str]]:
    """One mapping per logical processor of /proc/cpuinfo."""
    text = read_text(root / "proc/cpuinfo") or ""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        pairs = (line.partition(":") for line in block.splitlines())
        blocks.append({key.strip(): value.strip() for key, _, value in pairs})
    return [block for block in blocks if "processor" in block]


def _physical_cores(root: Path, blocks: list[dict[str, str]]) -> int | None:
    """Distinct cores: from /proc/cpuinfo on x86, from the topology files elsewhere."""
    named = {(block.get("physical id"), block["core id"]) for block in blocks if "core id" in block}
    if named:
        return len(named)
    folders = [path for path in children(root / "sys/devices/system/cpu") if re.fullmatch(r"cpu\d+", path.name)]
    siblings = {read_text(path / "topology/thread_siblings_list") for path in folders} - {None}
    return len(siblings) or None


def _max_mhz(root: Path, blocks: list[dict[str, str]]) -> float | None:
    """Return the highest clock; in virtual machines, which hide it, the clock that /proc/cpuinfo shows."""
    kilohertz = read_int(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if kilohertz:
        return kilohertz / 1000
    shown = [float(block["cpu MHz"]) for block in blocks if re.fullmatch(r"[\d.]+", block.get("cpu MHz", ""))]
    return max(shown, default=None)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (re.match(r"(\w+):\s+(\d+) kB", line) for line in (read_text(root / "proc/meminfo") or "").splitlines())
    return {match[1]: int(match[2]) * KIB for match in lines if match}


def _macos_host() -> Host:
    names = ("machdep.cpu.brand_string", "hw.physicalcpu", "hw.logicalcpu", "hw.memsize")
    brand, physical, logical, memory = (_command("sysctl", "-n", name) for name in names)
    total = int(memory) if memory and memory.isdigit() else None
    return Host(
        system=_system(),
        cpu_model=brand,
        physical_cores=int(physical) if physical and physical.isdigit() else None,
        logical_cores=int(logical) if logical and logical.isdigit() else os.cpu_count(),
        usable_cores=int(logical) if logical and logical.isdigit() else os.cpu_count(),
        memory_total_bytes=total,
        memory_available_bytes=macos_available(_command("vm_stat") or "") or total,
    )


def macos_available(vm_stat: str) -> int | None:
    """Bytes in free, inactive and speculative pages, from what `vm_stat` prints."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = re.findall(r"^Pages (?:free|inactive|speculative):\s+(\d+)", vm_stat, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and pages else None


def _command(*words: str) -> str | None:
    import subprocess  # slow to import, and Linux never needs it

    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
