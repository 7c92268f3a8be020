"""A machine and small benchmarks that several tests use."""

from __future__ import annotations

from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions
from hardware_db.microbench.grid import Point
from hardware_db.probe import Machine
from hardware_db.probe.machine import Host, Software

FINGERPRINT = Fingerprint(machine=MachineIdentity(cpu="a processor", cores=2), versions=Versions(torch="2.13"))
LAPTOP = Machine(
    host=Host(
        system="Linux",
        cpu_model="a processor",
        cpu_flags=frozenset({"avx2", "fma"}),
        physical_cores=2,
        logical_cores=2,
        usable_cores=2,
        cpu_max_mhz=2000.0,
        memory_total_bytes=8 << 30,
        memory_available_bytes=8 << 30,
    ),
    software=Software(python="3.13"),
)


def launches(count: int, ranks: int = 1) -> tuple[Point, ...]:
    """Points that take no time to speak of."""
    return tuple(Point(operation="memory", size=1024 * (1 + number), ranks=ranks) for number in range(count))
