"""How often the kernel has killed a process of this cgroup for want of memory. No torch.

The kernel counts in the victim's cgroup whether the cgroup's limit or the host's memory was used up: `oom_kill` of
`memory.events` (cgroup v2, kernel 4.13) or of `memory.oom_control` (v1), Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_kills(own: Path = _OWN, root: Path = _ROOT) -> int:
    """Kills so far in this process's cgroup; 0 where nobody counts."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return 0
    return max((_count(path) for line in lines for path in _counters(line, root)), default=0)


def _counters(line: str, root: Path) -> list[Path]:
    """Where the counter of a line of /proc/self/cgroup (`id:controllers:path`) may be.

    In a container the path may be the host's while the mount shows the container's own cgroup as its root.
    """
    _, controllers, path = (*line.split(":", 2), "", "")[:3]
    inside = path.lstrip("/")
    if not controllers:
        return [root / inside / "memory.events", root / "memory.events"]
    if "memory" in controllers.split(","):
        return [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return []


def _count(path: Path) -> int:
    try:
        words = path.read_text().split()
    except OSError:
        return 0
    found = dict(zip(words[::2], words[1::2], strict=False)).get("oom_kill", "0")
    return int(found) if found.isdecimal() else 0
