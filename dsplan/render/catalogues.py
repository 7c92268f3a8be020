"""Catalogue rows as tables and JSON: models, devices, links, node types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from dsplan.render.blocks import Block, Column, Table, Text
from hardware_db.device import Device, Link, NodeType
from hardware_db.units import format_bytes, format_count
from planner.models.facts import ModelFacts

Row = TypeVar("Row", Device, Link, NodeType, ModelFacts)

_SEARCHED = ("name", "vendor", "architecture", "provider", "gpu", "scope", "family", "kind", "model_type")


def matching(rows: Iterable[Row], text: str) -> list[Row]:
    """The rows that have `text`, in any case, in their name, an alias or the group they belong to."""
    wanted = text.lower()
    return [row for row in rows if any(wanted in word.lower() for word in _words(row))]


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows with every figure the catalogue holds and its source."""
    return [{name: _plain(value) for name, value in asdict(row).items()} for row in rows]


def models_table(rows: Sequence[ModelFacts]) -> list[Block]:
    columns = (Column("model"), Column("family"), Column("kind"), Column("parameters", True), Column("active", True))
    columns += (Column("layers", True), Column("hidden", True), Column("positions", True), Column("vocabulary", True))
    table = Table(columns=columns, rows=[_model_row(row) for row in rows])
    return _counted(table, "models")


def devices_table(rows: Sequence[Device]) -> list[Block]:
    columns = (Column("device"), Column("vendor"), Column("family"), Column("memory", True), Column("GB/s", True))
    columns += (Column("fp32", True), Column("bf16 TFLOP/s", True), Column("NVLink GB/s", True), Column("watts", True))
    table = Table(columns=columns, rows=[_device_row(row) for row in rows])
    return _counted(table, "devices")


def links_table(rows: Sequence[Link]) -> list[Block]:
    columns = (Column("link"), Column("scope"), Column("per"), Column("GB/s peak", True), Column("GB/s p2p", True))
    columns += (Column("all-reduce bus GB/s", True), Column("Gbit/s", True))
    table = Table(columns=columns, rows=[_link_row(row) for row in rows])
    return _counted(table, "links")


def nodes_table(rows: Sequence[NodeType]) -> list[Block]:
    columns = (Column("node type"), Column("provider"), Column("GPUs"), Column("inside"), Column("between"))
    columns += (Column("Gbit/s", True), Column("cores", True), Column("RAM GiB", True), Column("NVMe GB", True))
    table = Table(columns=columns, rows=[_node_row(row) for row in rows])
    return _counted(table, "machine types")


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
