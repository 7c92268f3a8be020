"""A probed machine as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from dsplan.render.blocks import Bar, Block, Cell, Table, Text, columns
from hardware_db.probe.machine import Disk, Gpu, GpuPair, Host, Machine, Nic, Software
from hardware_db.units import format_bytes


def as_json(machine: Machine) -> dict[str, Any]:
    """Everything the probe found, by field."""
    found = asdict(machine)
    found["host"]["cpu_flags"] = sorted(machine.host.cpu_flags)
    found["software"]["packages"] = dict(machine.software.packages)
    return found


def machine_blocks(machine: Machine) -> list[Block]:
    """GPUs and how they reach each other, host, disks, network, software; then what deserves attention."""
    host = machine.host
    blocks: list[Block] = []
    if machine.gpus:
        blocks.append(_gpu_table(machine.gpus))
        blocks += [Text(text=line, style="warning") for gpu in machine.gpus for line in _remarks(gpu)]
    if machine.pairs:
        blocks.append(_pair_table(machine))
    blocks += [_cpu(host), _memory(host)]
    blocks += [Text(text=f"disk      {_disk(disk)}") for disk in host.disks]
    blocks += [Text(text=f"network   {_nic(nic)}") for nic in host.nics]
    blocks.append(Text(text=f"software  {_software(machine.software)}"))
    return blocks + [Text(text=message, style="warning") for message in machine.messages]


def _gpu_table(gpus: Iterable[Gpu]) -> Table:
    headings = columns(
        ">GPU", "name", "in use", ">free", ">total", ">processes", ">SM MHz", ">watts", "PCIe", ">NVLinks"
    )
    return Table(columns=headings, rows=[_gpu_row(gpu) for gpu in gpus])


def _gpu_row(gpu: Gpu) -> list[Cell]:
    used: Cell = "-"
    if gpu.total_bytes and gpu.free_bytes is not None:
        used = Bar(share=1 - gpu.free_bytes / gpu.total_bytes)
    processes = "-" if gpu.processes is None else str(len(gpu.processes))
    watts = f"{_whole(gpu.power_draw_watts)}/{_whole(gpu.power_limit_watts)}"
    pcie = f"gen {_whole(gpu.pcie_generation)} x{_whole(gpu.pcie_width)}"
    clocks = f"{_whole(gpu.sm_clock_mhz)}/{_whole(gpu.sm_clock_max_mhz)}"
    memory = (_size(gpu.free_bytes), _size(gpu.total_bytes))
    return [str(gpu.index), gpu.name, used, *memory, processes, clocks, watts, pcie, _whole(gpu.nvlink_links)]


def _remarks(gpu: Gpu) -> Iterable[str]:
    """What keeps this GPU from being used whole or at full speed."""
    if gpu.lost:
        yield f"GPU {gpu.index} does not answer"
    if not gpu.visible:
        yield f"GPU {gpu.index} is hidden by CUDA_VISIBLE_DEVICES"
    if gpu.mig_enabled:
        slices = ", ".join(f"{item.name} ({_size(item.free_bytes)} free)" for item in gpu.mig_devices) or "none made"
        yield f"GPU {gpu.index} is cut into MIG slices: {slices}"
    if gpu.throttle_reasons:
        yield f"GPU {gpu.index} is held back by {', '.join(gpu.throttle_reasons)}"
    if gpu.ecc_uncorrected_errors:
        yield f"GPU {gpu.index} has {gpu.ecc_uncorrected_errors} uncorrected memory errors"
    for process in gpu.processes or ():
        yield f"GPU {gpu.index} is shared with process {process.pid}, which holds {_size(process.used_bytes)}"


def _pair_table(machine: Machine) -> Table:
    """Every GPU against every other: NVLink, or the nearest place where their PCIe paths meet."""
    indices = [gpu.index for gpu in machine.gpus]
    ways = {frozenset((pair.first, pair.second)): _way(pair) for pair in machine.pairs}
    headings = columns(">to GPU", *(str(index) for index in indices))
    rows = [
        [str(row), *("-" if row == column else ways.get(frozenset((row, column)), "?") for column in indices)]
        for row in indices
    ]
    return Table(columns=headings, rows=rows)


def _way(pair: GpuPair) -> str:
    return "nvlink" if pair.nvlink else pair.ancestor or "?"


def _cpu(host: Host) -> Text:
    cores = f"{_whole(host.usable_cores)} of {_whole(host.logical_cores)} logical cores usable"
    return Text(text=f"cpu       {host.cpu_model or 'unknown model'}; {cores}")


def _memory(host: Host) -> Text:
    limit = f", limited to {_size(host.memory_limit_bytes)} by the control group" if host.memory_limit_bytes else ""
    free, total = _size(host.memory_available_bytes), _size(host.memory_total_bytes)
    return Text(text=f"memory    {free} available of {total}{limit}")


def _disk(disk: Disk) -> str:
    free, total = _size(disk.free_bytes), _size(disk.total_bytes)
    return f"{disk.mount}: {free} free of {total}, {disk.kind or 'kind unknown'}"


def _nic(nic: Nic) -> str:
    return f"{nic.name}: {nic.kind}{f', {nic.gbit:g} Gbit/s' if nic.gbit else ''}"


def _software(software: Software) -> str:
    parts = [f"python {software.python}", *(f"{name} {version}" for name, version in software.packages)]
    parts += [f"driver {software.driver} (CUDA {software.driver_cuda})"] if software.driver else []
    return ", ".join(parts)


def _size(count_bytes: int | None) -> str:
    return "-" if count_bytes is None else format_bytes(count_bytes)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
