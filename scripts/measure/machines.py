"""The processors that rows were measured on.

A prediction beside a row is made for the row's machine, never for the one that computes it: pages, tables and figures
are the same wherever they are made.

A row names its machine by `cpu` and `cores`; `hardware_db/measurements/machines.csv` has what decides how fast such a
machine computes. A script that measures adds its own with `record`.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from functools import cache
from typing import Any

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text
from hardware_db.fingerprint import fingerprint
from hardware_db.measured_rows import SHIPPED
from hardware_db.probe import Host, Machine, Software
from hardware_db.probe.as_device import RATE_FLAGS
from hardware_db.units import GIB
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.types.cluster import Cluster

FILE = SHIPPED / "machines.csv"
_COLUMNS = ("cpu", "cores", "flags", "max_mhz")
_AMPLE_BYTES = 1024 * GIB
"""Memory of every machine here: rows say what runs needed, not what there was."""


def measured_cluster(device: str, ranks: int, *, nodes: int = 1, cpu: str = "", cores: int = 0) -> Cluster:
    """Return the cluster of a row: of a GPU from the datasheets, of a processor from `machines.csv`.

    Rows of bytes name no processor where none was written down; bytes are the same on each.

    Raises:
        BrokenFile: the row's processor is not in `machines.csv`.
    """
    host = host_of(cpu, cores) if device == "cpu" else Host(system="Linux")
    machine = Machine(host=host, software=Software(python=""))
    cluster = resolve_cluster(HardwareRequest(gpu=device, gpus=ranks, nodes=nodes), machine)
    # What was learnt and stored on the machine that reads is of no account.
    return replace(cluster, machine=None, host_cores_per_node=cores or cluster.host_cores_per_node)


def host_of(cpu: str, cores: int) -> Host:
    """Return a machine that rows name, a plain one of one core where they name none."""
    if not cpu:
        return _host(cpu="unnamed", cores=1, flags="", max_mhz=0.0)
    try:
        return _hosts()[cpu, cores]
    except KeyError:
        raise BrokenFile(str(FILE), f"has no {cpu!r} with {cores} cores", "record the machine of the rows") from None


def columns_of(machine: Machine) -> dict[str, Any]:
    """Return the columns by which rows name a probed machine."""
    identity = fingerprint(machine).machine
    return {"cpu": identity.cpu, "cores": identity.cores}


def record(machine: Machine) -> dict[str, Any]:
    """Add a probed machine to `machines.csv` if it lacks it, and return the columns by which rows name it."""
    columns = columns_of(machine)
    hosts = {(columns["cpu"], columns["cores"]): machine.host, **_hosts()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for (cpu, cores), host in sorted(hosts.items()):
        writer.writerow((cpu, cores, " ".join(sorted(host.cpu_flags & RATE_FLAGS)), host.cpu_max_mhz or 0.0))
    if not FILE.exists() or FILE.read_text(encoding="utf-8") != text.getvalue():
        replace_text(FILE, text.getvalue())
        _hosts.cache_clear()
    return columns


@cache
def _hosts() -> dict[tuple[str, int], Host]:
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["cpu"], int(row["cores"])): _host(
            cpu=row["cpu"], cores=int(row["cores"]), flags=row["flags"], max_mhz=float(row["max_mhz"])
        )
        for row in rows
    }


def _host(*, cpu: str, cores: int, flags: str, max_mhz: float) -> Host:
    return Host(
        system="Linux",
        cpu_model=cpu,
        cpu_flags=frozenset(flags.split()),
        cpu_max_mhz=max_mhz or None,
        physical_cores=cores,
        logical_cores=cores,
        usable_cores=cores,
        memory_total_bytes=_AMPLE_BYTES,
        memory_available_bytes=_AMPLE_BYTES,
    )
