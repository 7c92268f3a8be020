"""Probe of the machine: GPUs, links, host, software. Missing or broken hardware is reported, never raised."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardware_db.probe.machine import (
        Disk,
        Gpu,
        GpuPair,
        GpuProcess,
        Host,
        Machine,
        MigDevice,
        Nic,
        Software,
    )

NO_GPU = "no GPU found here"
"""The message of a machine without GPUs and without a driver for any."""

__all__ = [
    "NO_GPU",
    "Disk",
    "Gpu",
    "GpuPair",
    "GpuProcess",
    "Host",
    "Machine",
    "MigDevice",
    "Nic",
    "Software",
    "probe",
    "probe_hardware",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'hardware_db.probe' has no attribute {name!r}")
    return getattr(import_module("hardware_db.probe.machine"), name)  # a rank that reads its cgroup needs none of them


def probe() -> Machine:
    """Return this machine with the versions of its software."""
    from dataclasses import replace

    from hardware_db.probe.software import probe_software  # package metadata is slow to import

    machine = probe_hardware()
    software = probe_software()
    driver_only = machine.software
    return replace(machine, software=replace(software, driver=driver_only.driver, driver_cuda=driver_only.driver_cuda))


def probe_hardware() -> Machine:
    """Return this machine as planning needs it: GPUs, topology and host, of the software only the driver."""
    import os
    import platform

    from hardware_db.probe.host import probe_host
    from hardware_db.probe.machine import Machine, Software
    from hardware_db.probe.nvml import probe_nvidia
    from hardware_db.probe.other_gpus import probe_amd, probe_apple
    from hardware_db.probe.software import mark_visibility

    host = probe_host()
    answer = probe_nvidia()
    gpus, pairs = answer.gpus, answer.pairs
    if not gpus:
        gpus, pairs = probe_amd()
    if not gpus:
        gpus = probe_apple(host)
    software = Software(python=platform.python_version(), driver=answer.driver, driver_cuda=answer.driver_cuda)
    nothing = () if gpus or answer.messages else (NO_GPU,)
    return Machine(
        host=host,
        software=software,
        gpus=mark_visibility(gpus, os.environ),
        pairs=pairs,
        messages=(*answer.messages, *_ecc_messages(gpus), *nothing),
    )


def _ecc_messages(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Errors that memory protection could not repair have ended a process or will; a healthy GPU has none."""
    return tuple(
        f"GPU {gpu.index} has {gpu.ecc_uncorrected_errors} uncorrected ECC errors since the driver was loaded; "
        "reset it, and have it replaced if they come back"
        for gpu in gpus
        if gpu.ecc_uncorrected_errors
    )
