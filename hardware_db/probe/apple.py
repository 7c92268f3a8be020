"""The GPU of an Apple chip, which shares the host's memory."""

from __future__ import annotations

from hardware_db.probe.machine import Gpu, Host


def probe_apple(host: Host) -> tuple[Gpu, ...]:
    """The chip's GPU on macOS with Apple silicon, nothing elsewhere."""
    if not host.system.startswith("Darwin") or not (host.cpu_model or "").startswith("Apple"):
        return ()
    total, free = host.memory_total_bytes, host.memory_available_bytes
    used = None if total is None or free is None else total - free
    name = host.cpu_model or "Apple GPU"
    return (Gpu(index=0, name=name, vendor="apple", total_bytes=total, free_bytes=free, used_bytes=used),)
