"""Catalogue rows and a probed machine, as tables, text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from dsplan.render.show import Block, Text, show, show_json
from dsplan.render.table_columns import Bar, Cell, Table, columns
from hardware_db.device import Device, Link, NodeType
from hardware_db.probe.machine import Disk, Gpu, GpuPair, Host, Machine, Nic, Software
from hardware_db.units import format_bytes, format_count
from planner.models.facts import ModelFacts

Row = TypeVar("Row", Device, Link, NodeType, ModelFacts)

_SEARCHED = ("name", "vendor", "architecture", "provider", "gpu", "scope", "family", "kind", "model_type")


def show_listing(rows: Iterable[Row], table: Callable[[Sequence[Row]], list[Block]], text: str, *, json: bool) -> None:
    """Print the rows that have `text`, in any case, in their name, an alias or the group they belong to.

    JSON holds every figure of the catalogue with its source; the table holds those that people compare.
    """
    wanted = text.lower()
    matches = [row for row in rows if any(wanted in word.lower() for word in _words(row))]
    if json:
        show_json([{name: _plain(value) for name, value in asdict(row).items()} for row in matches])
    else:
        show(table(matches))


def models_table(rows: Sequence[ModelFacts]) -> list[Block]:
    """Return the table of `dsplan models`."""
    headings = columns(
        "model", "??family", "??kind", ">parameters", "?>active", ">layers", ">hidden", "??>positions", "??>vocabulary"
    )
    return _count(Table(columns=headings, rows=[_model_row(row) for row in rows]), "models")


def devices_table(rows: Sequence[Device]) -> list[Block]:
    """Return the table of GPUs of `dsplan devices`."""
    headings = columns(
        "device", "??vendor", "?family", ">memory", ">GB/s", "?>fp32", ">bf16 TFLOP/s", "?>NVLink GB/s", "??>watts"
    )
    return _count(Table(columns=headings, rows=[_device_row(row) for row in rows]), "devices")


def links_table(rows: Sequence[Link]) -> list[Block]:
    """Return the table of links of `dsplan devices`."""
    headings = columns("link", "??scope", "???per", ">GB/s peak", "?>GB/s p2p", "?>all-reduce bus GB/s", "??>Gbit/s")
    return _count(Table(columns=headings, rows=[_link_row(row) for row in rows]), "links")


def nodes_table(rows: Sequence[NodeType]) -> list[Block]:
    """Return the table of machine types of `dsplan devices`."""
    headings = columns(
        "node type", "??provider", "GPUs", "?inside", "?between", "?>Gbit/s", "??>cores", ">RAM GiB", "??>NVMe GB"
    )
    return _count(Table(columns=headings, rows=[_node_row(row) for row in rows]), "machine types")


def _words(row: Device | Link | NodeType | ModelFacts) -> Iterable[str]:
    yield from row.aliases
    yield from (str(getattr(row, name)) for name in _SEARCHED if hasattr(row, name))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, (tuple, list)) else value


def _count(table: Table, what: str) -> list[Block]:
    if not table.rows:
        return [Text(text=f"no {what} match; run the command without a filter to see all", style="warning")]
    return [table, Text(text=f"{len(table.rows)} {what}", style="faint")]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _model_row(row: ModelFacts) -> list[str]:
    active = format_count(row.active_parameters) if row.active_parameters < row.parameters else ""
    sizes = (row.total_layers, row.hidden_size, row.max_position_embeddings, row.vocab_size)
    return [row.name, row.family, row.kind, format_count(row.parameters), active, *(str(size or "-") for size in sizes)]


def _device_row(row: Device) -> list[str]:
    memory = "host RAM" if row.total_bytes is None else format_bytes(row.total_bytes)
    rates = (row.peak_tflops_dense.get("fp32"), row.peak_tflops_dense.get("bf16"), row.nvlink_total_gbs, row.tdp_watts)
    figures = (row.memory_bandwidth_gbs, *rates)
    return [row.name, row.vendor, row.architecture, memory, *(_figure(figure) for figure in figures)]


def _link_row(row: Link) -> list[str]:
    figures = (row.theoretical_gbs_per_direction, row.typical_p2p_gbs_per_direction)
    bus = row.busbw_gbs.get("all_reduce")
    return [row.name, row.scope, row.per or "", *(_figure(figure) for figure in (*figures, bus, row.line_rate_gbit))]


def _node_row(row: NodeType) -> list[str]:
    figures = (row.inter_node_gbit, row.cpu_cores, row.host_ram_gib, row.local_nvme_gb)
    gpus = f"{row.gpus_per_node} x {row.gpu}"
    links = (row.intra_link or "-", row.inter_link or "-")
    return [row.name, row.provider, gpus, *links, *(_figure(figure) for figure in figures)]


def as_json(machine: Machine) -> dict[str, Any]:
    """Everything the probe found, by field."""
    document = asdict(machine)
    document["host"]["cpu_flags"] = sorted(machine.host.cpu_flags)
    document["software"]["packages"] = dict(machine.software.packages)
    return document


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
        ">GPU", "name", "?in use", ">free", ">total", "?>processes", "??>SM MHz", "??>watts", "???PCIe", "???>NVLinks"
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
    """Return what keeps this GPU from being used whole or at full speed."""
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
    ways = {frozenset((pair.first, pair.second)): _link(pair) for pair in machine.pairs}
    headings = columns(">to GPU", *(str(index) for index in indices))
    rows = [
        [str(row), *("-" if row == column else ways.get(frozenset((row, column)), "?") for column in indices)]
        for row in indices
    ]
    return Table(columns=headings, rows=rows)


def _link(pair: GpuPair) -> str:
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
