"""A `Cluster` from what was asked of the hardware: named, described in a file, probed, or assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_db.datasheets import find_device, find_link, find_node_type, links
from hardware_db.device import Device, Link, NodeType
from hardware_db.handed_in import quote, read_yaml
from hardware_db.probe import NO_GPU, Machine, probe_hardware
from hardware_db.records import dataclass
from hardware_db.units import GB
from planner import limits
from planner.cluster.nodes import (
    Layout,
    cluster_of,
    default_node_type,
    price_per_gpu,
    spread,
    usual_gpus_per_node,
)
from planner.cluster.probed import (
    CPU_RANKS,
    cpu_cluster,
    gpu_cluster,
    mig_cluster,
    of_machine,
    probed_cluster,
)
from planner.errors import BrokenFile, ContradictoryRequest, UnknownName
from planner.question_defaults import ASSUMED_COUNT, ASSUMED_GPU
from planner.types.cluster import Cluster, Reliability

__all__ = ["HardwareRequest", "probed_cluster", "resolve_cluster"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareRequest:
    """The hardware flags as they were given. `gpus` is the total over all nodes.

    `interconnect` is a link between nodes, with the number of them in a node before it (`4xib-hdr`) where that is not
    the node type's. `memory_gb` stands in for a datasheet that has no memory figure (1e9 bytes per device) and is
    ignored otherwise.

    Raises:
        ContradictoryRequest: a count is not between 1 and 1,000,000.
    """

    gpus: int | None = None
    gpu: str | None = None
    nodes: int | None = None
    node_type: str | None = None
    interconnect: str | None = None
    cluster_file: str | None = None
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        for flag, count in (("--gpus", self.gpus), ("--nodes", self.nodes)):
            limits.GPUS.check(flag, count)
        limits.GIGABYTES.check("--max-memory-gb", self.memory_gb)


def resolve_cluster(request: HardwareRequest, machine: Machine | None = None) -> Cluster:
    """Return the cluster that a request means; `machine` is what was probed (probed now where it is needed and None).

    A cluster file, a node type or a GPU is planned for as named. With none of them it is the probed machine, and where
    that has no GPU, 8 x A100-SXM4-80GB with a sentence in `assumed` that says so.

    Raises:
        UnknownName: a GPU, node type or link is in no catalogue.
        ContradictoryRequest: the numbers cannot hold at the same time, or a device's memory is unknown.
        BrokenFile: the cluster file cannot be used.
    """
    if request.cluster_file is not None:
        cluster = read_cluster_file(request.cluster_file)
        _require_same_hardware(request, cluster)
    elif request.node_type is not None:
        cluster = _from_node_type(request)
    elif request.gpu is not None and request.gpu.lower() == "cpu":
        machine = machine or probe_hardware()
        cluster = _from_cpu(request, machine)
    elif request.gpu is not None:
        cluster = _from_gpu(request, find_device(request.gpu))
    else:
        machine = machine or probe_hardware()
        cluster = _from_machine(request, machine)
    if cluster.probed and machine is not None:
        cluster = of_machine(cluster, machine)
    if request.interconnect is not None:
        cluster = _join_by(cluster, request.interconnect, request.cluster_file)
    if cluster.gpus > limits.GPUS.most:
        raise ContradictoryRequest(f"{cluster.gpus:,} GPUs are more than {limits.GPUS.most:,}; ask for fewer nodes")
    return cluster


def _join_by(cluster: Cluster, wanted: str, cluster_file: str | None) -> Cluster:
    """Return the cluster with the named link between its nodes.

    An adapter is as often in a node as the node type has adapters, or as the name says; Ethernet, which hosts have
    beside them, once.
    """
    match = _SEVERAL.fullmatch(wanted)
    count, name = (int(match[1]), match[2]) if match else (None, wanted)
    link = find_link(name)
    if link.scope != "inter":
        between = ", ".join(other.name for other in links() if other.scope == "inter")
        raise ContradictoryRequest(f"--interconnect {wanted} is a link inside a node; between nodes are {between}")
    if cluster.nodes == 1:
        raise ContradictoryRequest(
            f"--interconnect {wanted} is between nodes, and {cluster.gpus} x {cluster.device.name} are one node here;"
            " leave it out or give --nodes"
        )
    if cluster_file is not None and link != cluster.inter_link:
        raise ContradictoryRequest(
            f"--interconnect {wanted} contradicts {cluster_file}; write inter_link: {name} there"
        )
    if count is not None and (link.per != "NIC" or not limits.NICS.allows(count)):
        raise ContradictoryRequest(
            f"--interconnect {wanted}: a node has no {count} x {link.name}; leave {match[1] if match else count}x out"
        )
    ordinary = link.name.startswith("eth-")
    nics = count or (1 if link.per != "NIC" or ordinary else cluster.nics_per_node)
    parts = [cluster.assumed] if cluster.assumed else []
    if link.per == "NIC" and count is None:
        parts.append(f"{nics} x {link.name} in each node (--interconnect {nics}x{link.name} names their number)")
    return replace(cluster, inter_link=link, nics_per_node=nics, assumed="; ".join(parts))


_SEVERAL = re.compile(r"([0-9]{1,4})x(.+)")


def _from_node_type(request: HardwareRequest) -> Cluster:
    node = find_node_type(request.node_type or "")
    device = find_device(node.gpu)
    if request.gpu is not None and find_device(request.gpu).name != device.name:
        raise ContradictoryRequest(f"--node-type {node.name} has {device.name}, not {request.gpu}; drop one of the two")
    per_node, gpus = node.gpus_per_node, request.gpus
    if gpus is None:
        layout = Layout(nodes=request.nodes or node.usual_nodes, gpus_per_node=per_node)
    elif request.nodes is None and gpus < per_node:
        layout = Layout(nodes=1, gpus_per_node=gpus)
    else:
        layout = Layout(nodes=request.nodes or gpus // per_node, gpus_per_node=per_node)
    if gpus is not None and layout.gpus != gpus:
        raise ContradictoryRequest(
            f"--gpus {gpus} contradicts {layout.nodes} x {node.name}, which have {layout.nodes} x {per_node} = "
            f"{layout.nodes * per_node} GPUs; drop --gpus or ask for a multiple of {per_node}"
        )
    return replace(cluster_of(device, layout, node, request.memory_gb), usd_per_gpu_hour=price_per_gpu(node))


def _from_cpu(request: HardwareRequest, machine: Machine) -> Cluster:
    nodes = request.nodes or 1
    ranks = request.gpus or CPU_RANKS * nodes
    if ranks % nodes:
        raise ContradictoryRequest(
            f"--gpus {ranks} ranks do not divide over --nodes {nodes}; ask for a multiple of {nodes}"
        )
    return cpu_cluster(machine.host, ranks // nodes, nodes)


def _from_gpu(request: HardwareRequest, device: Device) -> Cluster:
    """Return a cluster of as many as asked for; without a number all GPUs of the nodes asked for, else one GPU."""
    per_node = usual_gpus_per_node(device)
    gpus = request.gpus or (request.nodes * per_node if request.nodes else 1)
    layout = spread(gpus, request.nodes, device)
    node = default_node_type(device, layout.gpus_per_node)
    cluster = cluster_of(device, layout, node, request.memory_gb)
    remarks = [cluster.assumed] if cluster.assumed else []
    if node is not None:
        enlarged = f", enlarged to {layout.gpus_per_node} GPUs" if layout.gpus_per_node > node.gpus_per_node else ""
        remarks.append(f"host and links are taken from {node.name}{enlarged}{_link_rates(cluster)}")
    if layout.gpus_per_node > max(per_node, node.gpus_per_node if node else 0):
        remarks.append(f"{layout.gpus_per_node} of these GPUs in one node is more than any known machine has")
    return replace(cluster, assumed="; ".join(remarks))


def _link_rates(cluster: Cluster) -> str:
    """Return the links that several GPUs use and what they carry one way, in brackets; empty for one GPU."""
    inside, between = cluster.intra_link, cluster.inter_link
    rates = [_rate(inside, 1)] if inside is not None and cluster.gpus_per_node > 1 else []
    if between is not None and cluster.nodes > 1:
        rates.append(f"{_rate(between, cluster.nics_per_node)} between nodes")
    return f" ({', '.join(rates)})" if rates else ""


def _rate(link: Link, count: int) -> str:
    several, each = (f"{count} x ", " each") if count > 1 else ("", "")
    rate = link.theoretical_gbs_per_direction
    return f"{several}{link.name}" + (f" of {rate:.3g} GB/s{each}" if rate else "")


def _from_machine(request: HardwareRequest, machine: Machine) -> Cluster:
    here = machine.usable_gpus
    slices = None if here else mig_cluster(machine)
    if slices is not None and request.gpus in (None, 1) and request.nodes in (None, 1):
        return slices
    if not here:
        return _assume(request, machine)
    if request.gpus is not None and request.gpus <= len(here) and request.nodes in (None, 1):
        return gpu_cluster(machine, here[: request.gpus])
    if request.gpus is None:
        return gpu_cluster(machine, here, nodes=request.nodes or 1)
    return _more_than_here(request, machine)


def _assume(request: HardwareRequest, machine: Machine) -> Cluster:
    device = find_device(ASSUMED_GPU)
    gpus = request.gpus or ASSUMED_COUNT * (request.nodes or 1)
    cluster = _from_gpu(replace(request, gpus=gpus), device)
    why = "no GPU here can be used" if machine.gpus else next(iter(machine.messages), NO_GPU)
    sentence = f"{why}; assumed {gpus} x {device.name} (name yours with --gpu)"
    return replace(cluster, assumed=f"{sentence}; {cluster.assumed}")


def _more_than_here(request: HardwareRequest, machine: Machine) -> Cluster:
    """More GPUs of the kind that is here: nodes like this one, or one fuller node where that would hold them."""
    here = machine.usable_gpus
    cluster = gpu_cluster(machine, here)
    gpus = request.gpus or len(here)
    if request.nodes is None and gpus % len(here) == 0 and gpus > usual_gpus_per_node(cluster.device):
        return gpu_cluster(machine, here, nodes=gpus // len(here))
    if request.nodes is not None and gpus == request.nodes * len(here):
        return gpu_cluster(machine, here, nodes=request.nodes)
    named = _from_gpu(request, cluster.device)
    note = f"{len(here)} x {cluster.device.name} found here, planned for {gpus} of them"
    return replace(named, assumed="; ".join(part for part in (note, named.assumed) if part))


def cluster_of_plan(section: Mapping[str, Any], machine: Machine | None = None) -> Cluster | None:
    """Return the cluster of a plan's `cluster` section, or None for another machine's processor.

    It has this machine's devices where `machine` has such, else those of the datasheets.

    Raises:
        UnknownName: a device or a link is in no datasheet.
    """
    name, nodes, per_node = section["device"], section.get("nodes") or 1, section.get("gpus_per_node") or 1
    probed = None if machine is None else probed_cluster(machine, ranks=nodes * per_node)
    if probed is not None and (probed.device.name, probed.nodes) == (name, nodes):
        cluster = probed
    elif section.get("vendor") == "cpu" or name == "cpu":
        return None
    else:
        kind = section.get("node_type")
        node = find_node_type(kind) if kind else None
        base = cluster_of(find_device(name), Layout(nodes=nodes, gpus_per_node=per_node), node, memory_gb=1.0)
        cluster = replace(
            base,
            intra_link=_link(section.get("intra_link"), base.intra_link),
            inter_link=_link(section.get("inter_link"), base.inter_link),
            nics_per_node=section.get("nics_per_node") or 1,
            assumed=section.get("assumed") or "",
        )
    return replace(
        cluster,
        capacity_bytes=section["capacity_bytes"],
        host_memory_bytes_per_node=section.get("host_memory_bytes_per_node") or 0,
        nvme_bytes_per_node=section.get("nvme_bytes_per_node") or 0,
    )


def _link(name: str | None, base: Link | None) -> Link | None:
    """Return the link of this name; that of the node type, which may be sold slower than it is, where it is the one."""
    if name is None:
        return None
    return base if base is not None and base.name == name else find_link(name)


def _require_same_hardware(request: HardwareRequest, cluster: Cluster) -> None:
    """Refuse flags that contradict a cluster file, which says everything about the cluster; they may repeat it."""
    for flag, requested, actual in (
        ("--gpus", request.gpus, cluster.gpus),
        ("--nodes", request.nodes, cluster.nodes),
        ("--gpu", request.gpu and find_device(request.gpu).name, cluster.device.name),
        ("--node-type", request.node_type and find_node_type(request.node_type).name, cluster.node_type),
    ):
        if requested is not None and requested != actual:
            raise ContradictoryRequest(
                f"{flag} {requested} contradicts {request.cluster_file}, which describes {cluster.nodes} x "
                f"{cluster.gpus_per_node} {cluster.device.name}; drop {flag} or change the file"
            )


# A cluster described in YAML: a GPU, how many, and any figure that is known better than the catalogue does.
#
#     gpu: H100-SXM5-80GB
#     nodes: 4
#     gpus_per_node: 8
#     inter_link: ib-ndr
#     host_memory_gb: 1500


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
    **_FAILURES,
    **dict.fromkeys(_SIZES, limits.GIGABYTES),
    **dict.fromkeys(_PRICES, limits.USD_PER_HOUR),
}
_UNITS = {**dict.fromkeys(_SIZES, " gigabytes (1e9 bytes)"), **dict.fromkeys(_PRICES, " dollars")}
KEYS = (*_TEXT, *_NUMBERS)


def read_cluster_file(path: str) -> Cluster:
    """Return the cluster in a file. What it leaves out comes from its node type, or the usual node type of its GPU.

    Raises:
        BrokenFile: the file is missing, not YAML, or a key is unknown or of the wrong type; one line with the remedy.
    """
    given = _check(path, _mapping(path))
    try:
        return _with_figures(_base(path, given), given)
    except (UnknownName, ContradictoryRequest) as error:
        raise BrokenFile(path, str(error)) from error


def _mapping(path: str) -> dict[Any, Any]:
    data = read_yaml(path, "give a YAML file that describes a cluster, or correct it")
    if not isinstance(data, dict):
        raise BrokenFile(path, "holds no keys", "write gpu, nodes, gpus_per_node as `key: value` lines")
    return data


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


def _base(path: str, given: dict[str, Any]) -> Cluster:
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


def _with_figures(cluster: Cluster, given: dict[str, Any]) -> Cluster:
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
    stated = {key: given[key] for key in _FAILURES if key in given}
    if stated:
        changes["reliability"] = Reliability(**stated)
    if "usd_per_gpu_hour" in given:
        changes["usd_per_gpu_hour"] = float(given["usd_per_gpu_hour"])
    return replace(cluster, **changes)
