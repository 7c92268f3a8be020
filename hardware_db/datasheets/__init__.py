"""Accelerators, links and node types as data: the YAML files here, each figure with its source."""

from hardware_db.datasheets.loader import (
    devices,
    failure_record,
    find_device,
    find_link,
    find_node_type,
    links,
    node_types,
    recovery,
    sources,
)

__all__ = [
    "devices",
    "failure_record",
    "find_device",
    "find_link",
    "find_node_type",
    "links",
    "node_types",
    "recovery",
    "sources",
]
