"""Catalogue rows as tables and JSON: models, devices, links, node types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from dsplan.render.blocks import Block, Table, Text, columns
from dsplan.render.show import show, show_json
from hardware_db.device import Device, Link, NodeType
from hardware_db.units import format_bytes, format_count
from planner.models.facts import ModelFacts

Row = TypeVar("Row", Device, Link, NodeType, ModelFacts)

_SEARCHED = ("name", "vendor", "architecture", "provider", "gpu", "scope", "family", "kind", "model_type")


def show_listing(rows: Iterable[Row], table: Callable[[Sequence[Row]], list[Block]], text: str, *, json: bool) -> None:
    """Print the rows that have `text`, in any case, in their name, an alias or the group they belong to.

    JSON holds every figure of the catalogue with its source; the table holds those that people compare.
    """
    wanted = text.lower()
    found = [row for row in rows if any(wanted in word.lower() for word in _words(row))]
    if json:
        show_json([{name: _plain(value) for name, value in asdict(row).items()} for row in found])
    else:
        show(table(found))


def models_table(rows: Sequence[ModelFacts]) -> list[Block]:
    headings = columns(
        "model", "?family", "?kind", ">parameters", ">active", ">layers", ">hidden", "?>positions", "?>vocabulary"
    )
    return _counted(Table(columns=headings, rows=[_model_row(row) for row in rows]), "models")


def devices_table(rows: Sequence[Device]) -> list[Block]:
    headings = columns(
        "device", "?vendor", "family", ">memory", ">GB/s", ">fp32", ">bf16 TFLOP/s", "?>NVLink GB/s", "?>watts"
    )
    return _counted(Table(columns=headings, rows=[_device_row(row) for row in rows]), "devices")


def links_table(rows: Sequence[Link]) -> list[Block]:
    headings = columns("link", "scope", "per", ">GB/s peak", ">GB/s p2p", ">all-reduce bus GB/s", ">Gbit/s")
    return _counted(Table(columns=headings, rows=[_link_row(row) for row in rows]), "links")


def nodes_table(rows: Sequence[NodeType]) -> list[Block]:
    headings = columns(
        "node type", "?provider", "GPUs", "?inside", "between", "?>Gbit/s", "?>cores", ">RAM GiB", "?>NVMe GB"
    )
    return _counted(Table(columns=headings, rows=[_node_row(row) for row in rows]), "machine types")


def _words(row: Device | Link | NodeType | ModelFacts) -> Iterable[str]:
    yield from row.aliases
    yield from (str(getattr(row, name)) for name in _SEARCHED if hasattr(row, name))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, (tuple, list)) else value


def _counted(table: Table, what: str) -> list[Block]:
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
