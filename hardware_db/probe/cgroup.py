"""Limits of this process: memory and processor time of its control group (versions 1 and 2), and its cores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from hardware_db.files import read_int, read_text
from hardware_db.records import dataclass

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 where there is no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Return the tightest limits on the way from this process to the root, or None if there is none.

    `memory_left_bytes` is the limit less what cannot be reclaimed of what the group holds.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cpus: int | None = None


def cgroup_limits(root: Path = Path("/")) -> Limits:
    """Return the limits of the control groups this process is in."""
    groups = _groups(root)
    memory = [usage for folder in groups["memory"] if (usage := _memory(folder)) is not None]
    cpus = [count for folder in groups["cpu"] if (count := _cpus(folder)) is not None]
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        cpus=min(cpus, default=None),
    )


def memory_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel has killed a process of this group for want of memory; 0 where nobody counts.

    In a container the group's path may be the host's while the mount shows the container's own group as its root.
    """
    folders = _groups(root, lambda base, path: [base / path.lstrip("/"), base])["memory"]
    counters = (folder / name for folder in folders for name in ("memory.events", "memory.oom_control"))
    return max((_statistic(counter, "oom_kill") for counter in counters), default=0)


def usable_cores(limits: Limits | None = None) -> int:
    """Return how many logical cores this process may use, by its affinity and its control group's quota.

    Threads, workers and processes at once are counted by this, not by the cores of the machine.
    """
    # os.process_cpu_count (Python 3.13) knows no quota either.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, (limits or cgroup_limits()).cpus or allowed)


def _upwards(base: Path, path: str) -> list[Path]:
    """Return the group's directory and its parents; a container's path may name groups that are not mounted."""
    relative = PurePosixPath(path.lstrip("/"))
    return [base / parent for parent in (relative, *relative.parents)]


def _groups(root: Path, folders_of: Callable[[Path, str], list[Path]] = _upwards) -> dict[str, list[Path]]:
    """Directories that can limit memory and cpu: the group of this process and all above it, unless others count."""
    base = root / "sys/fs/cgroup"
    folders: dict[str, list[Path]] = {"memory": [], "cpu": []}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for wanted in folders:
            if wanted in controllers.split(","):
                folders[wanted] += folders_of(base / wanted, path)
            elif controllers == "":
                folders[wanted] += folders_of(base, path) + folders_of(base / "unified", path)
    return folders


def _memory(folder: Path) -> tuple[int, int] | None:
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = read_int(folder / limit_file)
        if limit is not None and limit < _UNLIMITED:
            used = (read_int(folder / used_file) or 0) - _statistic(folder / "memory.stat", cache_key)
            return limit, max(0, limit - max(0, used))
    return None


def _statistic(path: Path, key: str) -> int:
    """One figure of memory.stat or memory.events, 0 where it is not there."""
    for line in (read_text(path) or "").splitlines():
        name, _, number = line.partition(" ")
        if name == key and number.strip().isdigit():
            return int(number)
    return 0


def _cpus(folder: Path) -> int | None:
    words = (read_text(folder / "cpu.max") or "").split()
    quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "0")
    if quota.isdigit() and period.isdigit() and int(period):
        return max(1, math.ceil(int(quota) / int(period)))
    old_quota, old_period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    if old_quota and old_period and old_quota > 0:
        return max(1, math.ceil(old_quota / old_period))
    return None
