"""A cluster described in YAML: a GPU, how many, and any figure that is known better than the catalogue does.

    gpu: H100-SXM5-80GB
    nodes: 4
    gpus_per_node: 8
    inter_link: ib-ndr
    host_memory_gb: 1500

Nodes that differ are groups, each with keys of its own; what a group leaves out is as above it.

    gpu: A100-SXM4-80GB
    inter_link: ib-hdr
    groups:
    - nodes: 3
    - nodes: 1
      speed: 0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_db.datasheets import find_device, find_link, find_node_type
from hardware_db.device import NodeType
from hardware_db.handed_in import quote, read_yaml
from hardware_db.units import GB
from planner import limits
from planner.cluster.groups import level
from planner.cluster.nodes import Layout, cluster_of, default_node_type, price_per_gpu, usual_gpus_per_node
from planner.errors import BrokenFile, ContradictoryRequest, UnknownName
from planner.types.cluster import PUBLISHED, Cluster, Reliability

_TEXT = ("gpu", "device", "node_type", "intra_link", "inter_link")
_COUNTS = {
    "nodes": limits.GPUS,
    "gpus_per_node": limits.GPUS,
    "nics_per_node": limits.NICS,
    "host_cores": limits.HOST_CORES,
}
_SIZES = ("capacity_gb", "host_memory_gb", "nvme_gb")
_PRICES = ("usd_per_gpu_hour",)
_FAILURES = {
    "failures_per_1000_node_days": limits.FAILURES,
    "restart_minutes": limits.MINUTES,
    "checkpoint_gbs_per_node": limits.GIGABYTES_PER_SECOND,
    "save_seconds": limits.SECONDS,
    "spare_nodes": limits.SPARES,
    "repair_hours": limits.HOURS,
}
"""Fields of `Reliability`."""
_NUMBERS = {
    **_COUNTS,
    "speed": limits.SPEED,
    **_FAILURES,
    **dict.fromkeys(_SIZES, limits.GIGABYTES),
    **dict.fromkeys(_PRICES, limits.USD_PER_HOUR),
}
_UNITS = {**dict.fromkeys(_SIZES, " gigabytes (1e9 bytes)"), **dict.fromkeys(_PRICES, " dollars")}
KEYS = (*_TEXT, *_NUMBERS, "groups")
_OF_ALL = (*_FAILURES, "groups")
"""Keys that no group has for itself."""
_BETWEEN_NODES = ("inter_link",)
"""Keys that hold for a group of another GPU too."""


def read_cluster_file(path: str) -> Cluster:
    """Return the cluster in a file. What it leaves out comes from its node type, or the usual node type of its GPU.

    One of groups is planned as `planner.cluster.groups.level` has it.

    Raises:
        BrokenFile: the file is missing, not YAML, or a key is unknown or of the wrong type; one line with the remedy.
    """
    given = _mapping(path)
    groups = given.pop("groups", None)
    given = _check(path, given)
    try:
        if groups is None:
            return _with_figures(_base(path, given), given)
        parts = [_with_figures(_base(path, each), each) for each in _groups(path, given, groups)]
        return replace(level(parts), reliability=_reliability(given))
    except (UnknownName, ContradictoryRequest) as error:
        raise BrokenFile(path, str(error)) from error


def _mapping(path: str) -> dict[Any, Any]:
    data = read_yaml(path, "give a YAML file that describes a cluster, or correct it")
    if not isinstance(data, dict):
        raise BrokenFile(path, "holds no keys", "write gpu, nodes, gpus_per_node as `key: value` lines")
    return data


def _groups(path: str, common: Mapping[str, Any], groups: object) -> list[dict[str, Any]]:
    """Return the keys of each group of nodes, its own before those above the groups."""
    if not isinstance(groups, list) or not groups or not all(isinstance(each, dict) for each in groups):
        raise BrokenFile(path, f"groups is {quote(groups)}", "write a list of groups, each with keys of its own")
    if "nodes" in common:
        raise BrokenFile(path, "has nodes beside groups", "write nodes in each group")
    whole = []
    for number, each in enumerate(groups, 1):
        own = _check(path, each)
        if misplaced := [key for key in own if key in _OF_ALL]:
            raise BrokenFile(path, f"group {number} has {misplaced[0]}", "write it above the groups, for all of them")
        is_other = "gpu" in own or "node_type" in own
        kept = {key: value for key, value in common.items() if not is_other or key in _BETWEEN_NODES}
        whole.append(kept | own)
    return whole


def _check(path: str, data: dict[Any, Any]) -> dict[str, Any]:
    for key, given in data.items():
        if key not in KEYS:
            raise BrokenFile(path, f"unknown key {quote(key)}", f"keys are {', '.join(KEYS)}")
        if key in _TEXT and not (isinstance(given, str | int) and not isinstance(given, bool) and str(given).strip()):
            raise BrokenFile(path, f"{key} is {quote(given)}", "write a name")
        if key in _NUMBERS and not _NUMBERS[key].allows(given):
            raise BrokenFile(path, f"{key} is {quote(given)}", f"write {_NUMBERS[key]}{_UNITS.get(key, '')}")
    if "gpu" in data and "device" in data:
        raise BrokenFile(path, "names both gpu and device", "keep one; they mean the same")
    return {"gpu" if key == "device" else key: str(given) if key in _TEXT else given for key, given in data.items()}


def _base(path: str, given: Mapping[str, Any]) -> Cluster:
    node: NodeType | None = find_node_type(given["node_type"]) if "node_type" in given else None
    if node is None and "gpu" not in given:
        raise BrokenFile(path, "names no GPU", "add `gpu: NAME` or `node_type: NAME`")
    device = find_device(given.get("gpu") or (node.gpu if node else ""))
    if node is not None and node.gpu != device.name:
        raise BrokenFile(path, f"node_type {node.name} has {node.gpu}, not {device.name}", "drop one of the two")
    per_node = given.get("gpus_per_node") or (node.gpus_per_node if node else usual_gpus_per_node(device))
    layout = Layout(nodes=given.get("nodes", 1), gpus_per_node=per_node)
    cluster = cluster_of(device, layout, node or default_node_type(device, per_node), given.get("capacity_gb"))
    return cluster if node is None else replace(cluster, usd_per_gpu_hour=price_per_gpu(node))


def _with_figures(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    changes: dict[str, Any] = {key: find_link(given[key]) for key in ("intra_link", "inter_link") if key in given}
    for key, field, scale in (
        ("capacity_gb", "capacity_bytes", GB),
        ("host_memory_gb", "host_memory_bytes_per_node", GB),
        ("nvme_gb", "nvme_bytes_per_node", GB),
        ("host_cores", "host_cores_per_node", 1),
        ("nics_per_node", "nics_per_node", 1),
    ):
        if key in given:
            changes[field] = round(given[key] * scale)
    for key in ("speed", "usd_per_gpu_hour"):
        if key in given:
            changes[key] = float(given[key])
    return replace(cluster, reliability=_reliability(given), **changes)


def _reliability(given: Mapping[str, Any]) -> Reliability:
    stated = {key: given[key] for key in _FAILURES if key in given}
    return Reliability(**stated) if stated else PUBLISHED
