"""A `Cluster` from what was asked of the hardware: named, described in a file, probed, or assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_db.datasheets import find_device, find_link, find_node_type, links
from hardware_db.device import Device, Link
from hardware_db.probe import NO_GPU, Machine, probe_hardware
from hardware_db.records import dataclass
from planner import limits
from planner.cluster.cluster_file import read_cluster_file
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
from planner.errors import ContradictoryRequest
from planner.question_defaults import ASSUMED_COUNT, ASSUMED_GPU
from planner.types.cluster import Cluster

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
