"""Clusters of named hardware: how GPUs are spread over nodes, and which node type stands for the host and the links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from hardware_db.datasheets import find_link, node_types
from hardware_db.device import Device, Link, NodeType
from hardware_db.records import dataclass
from hardware_db.topology import default_link
from hardware_db.units import GB, GIB
from planner.errors import ContradictoryRequest
from planner.types.cluster import Cluster

# Machines one can own come before machines one can rent: their hosts are not cut down to a price.
_PROVIDER_RANK = {"nvidia": 0, "generic": 1, "local": 2}
_CLOUD_RANK = 3
_PCIE_SLOTS = 8
_NVL72_TRAY, _NVL72_DOMAIN = 4, 72

# For devices that no node type of the catalogue carries: NVIDIA's configuration guide for certified systems asks for at
# least 1.5 times the GPUs' memory and six cores per GPU (recalled); 100 Gbit/s is a common network of such servers.
_HOST_MEMORY_PER_GPU_MEMORY = 1.5
_CORES_PER_GPU = 6
PLAIN_NETWORK = "eth-100"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """`gpus_per_node` GPUs on each of `nodes` nodes."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


def spread(gpus: int, nodes: int | None, device: Device) -> Layout:
    """GPUs over equal nodes; without a number of nodes, as few as nodes of the device's usual size allow.

    Raises:
        ContradictoryRequest: the GPUs do not divide evenly; the message names numbers that would.
    """
    usual = usual_gpus_per_node(device)
    count = nodes or math.ceil(gpus / usual)
    if count > gpus:
        raise ContradictoryRequest(f"{gpus} GPUs cannot be spread over {count} nodes; ask for at most {gpus} nodes")
    if gpus % count:
        below, above = gpus - gpus % count, gpus - gpus % count + count
        even = next(fewer for fewer in range(math.ceil(gpus / usual), gpus + 1) if gpus % fewer == 0)
        raise ContradictoryRequest(
            f"{gpus} GPUs do not divide evenly over {count} nodes; ask for {below} or {above} GPUs, or --nodes {even}"
        )
    return Layout(nodes=count, gpus_per_node=gpus // count)


def usual_gpus_per_node(device: Device) -> int:
    """Return how many of these GPUs one machine usually has.

    Cards: eight, the slots of a server. Modules: as many as in the catalogue's largest node type of the best provider.
    Superchips: four on a tray of an NVL72 rack, else one. Systems on a chip: one.
    """
    if device.form == "SoC":
        return 1
    if device.form == "PCIe":
        return _PCIE_SLOTS
    carriers = _carriers(device)
    if carriers:
        best = _rank(carriers[0])
        return max(node.gpus_per_node for node in carriers if _rank(node) == best)
    if device.form == "superchip":
        return _NVL72_TRAY if _is_rack_scale(device) else 1
    return _PCIE_SLOTS


def default_node_type(device: Device, gpus_per_node: int) -> NodeType | None:
    """Return the node type for unnamed machines with this many of these GPUs, or None if no row has the device.

    NVIDIA's own before generic ones, workstations and servers, before clouds; among those the smallest that is large
    enough, else the largest there is.
    """
    carriers = _carriers(device)
    enough = [node for node in carriers if node.gpus_per_node >= gpus_per_node]
    if enough:
        return min(enough, key=lambda node: (_rank(node), node.gpus_per_node))
    return max(carriers, key=lambda node: node.gpus_per_node, default=None)


def capacity(device: Device, memory_gb: float | None = None) -> int:
    """Bytes a process may use on an idle device; `memory_gb` where the datasheet has no figure.

    Raises:
        ContradictoryRequest: the datasheet has no figure and none was given.
    """
    capacity = device.capacity_bytes
    if capacity is not None:
        return capacity
    if memory_gb is not None:
        return round(memory_gb * GB)
    raise ContradictoryRequest(
        f"the memory of {device.name} is not in its datasheet; give it with --max-memory-gb, or as capacity_gb in a "
        "--cluster file"
    )


def price_per_gpu(node: NodeType) -> float | None:
    """Return the dollars per hour and GPU of a node type, or None if no price is published."""
    return None if node.usd_per_hour is None else node.usd_per_hour / node.gpus_per_node


def cluster_of(device: Device, layout: Layout, node: NodeType | None, memory_gb: float | None = None) -> Cluster:
    """Return a cluster of a named device. A node type with more GPUs than are used lends its host in proportion.

    Raises:
        ContradictoryRequest: the memory of the device is unknown.
    """
    bytes_per_device = capacity(device, memory_gb)
    if node is None:
        return _without_node_type(device, layout, bytes_per_device)
    share = layout.gpus_per_node / node.gpus_per_node
    inter_link, nics = network(device, layout, node)
    return Cluster(
        device=device,
        nodes=layout.nodes,
        gpus_per_node=layout.gpus_per_node,
        capacity_bytes=bytes_per_device,
        intra_link=_intra_link(device, layout.gpus_per_node, node),
        inter_link=inter_link,
        nics_per_node=nics,
        host_memory_bytes_per_node=_host_memory(node, layout, bytes_per_device),
        host_cores_per_node=_host_cores(node, layout),
        nvme_bytes_per_node=round((node.local_nvme_gb or 0) * GB * share),
        node_type=node.name,
    )


def network(device: Device, layout: Layout, node: NodeType) -> tuple[Link | None, int]:
    """Return the link between nodes and how many of them a node has.

    A link whose figures are per node counts once. Where a provider sells less than the adapters' line rate, the link is
    scaled to it. Inside one NVL72 rack nodes talk over NVLink; a node of more GPUs than a tray has is several
    trays of one NVLink domain, each with its adapters.
    """
    if _is_rack_scale(device) and layout.gpus <= _NVL72_DOMAIN and node.intra_link is not None:
        return find_link(node.intra_link), layout.gpus_per_node
    if node.inter_link is None:
        return None, 1
    link = find_link(node.inter_link)
    nics = node.nics or 1 if link.per == "NIC" else 1
    rate = (link.per_node_gbit or link.line_rate_gbit or 0) * nics
    sold = node.inter_node_gbit or rate
    trays = max(1, layout.gpus_per_node // node.gpus_per_node) if _is_rack_scale(device) and link.per == "NIC" else 1
    return (link if sold >= rate else scale_link(link, sold / rate)), nics * trays


def scale_link(link: Link, factor: float) -> Link:
    """Return the same link with every rate times `factor`; latencies stay."""

    def rates(busbw: Mapping[str, float | None]) -> dict[str, float | None]:
        return {key: rate if rate is None or key == "gpus" else rate * factor for key, rate in busbw.items()}

    theoretical, typical = link.theoretical_gbs_per_direction, link.typical_p2p_gbs_per_direction
    return replace(
        link,
        theoretical_gbs_per_direction=None if theoretical is None else theoretical * factor,
        typical_p2p_gbs_per_direction=None if typical is None else typical * factor,
        busbw_gbs=rates(link.busbw_gbs),
        busbw_nvls=rates(link.busbw_nvls),
        busbw_2_gpus=rates(link.busbw_2_gpus),
        busbw_4_gpus=rates(link.busbw_4_gpus),
        size_curve_all_reduce=(),
    )


def _without_node_type(device: Device, layout: Layout, bytes_per_device: int) -> Cluster:
    gpus = layout.gpus_per_node
    unified = device.form == "SoC"  # the host's memory is the device's
    ratio = 1.0 if unified else _HOST_MEMORY_PER_GPU_MEMORY
    memory = "memory shared with the host" if unified else f"host memory of {ratio:g} times the device's per GPU"
    between = f", {PLAIN_NETWORK} between nodes" if layout.nodes > 1 else ""
    return Cluster(
        device=device,
        nodes=layout.nodes,
        gpus_per_node=gpus,
        capacity_bytes=bytes_per_device,
        intra_link=default_link(device, gpus),
        inter_link=find_link(PLAIN_NETWORK),
        host_memory_bytes_per_node=round(bytes_per_device * gpus * ratio),
        host_cores_per_node=gpus * _CORES_PER_GPU,
        assumed=f"no node type carries {device.name}: assumed {_CORES_PER_GPU} cores, {memory}{between}",
    )


def _intra_link(device: Device, gpus_per_node: int, node: NodeType) -> Link | None:
    """Return the node type's own link; a bridge between two cards does not join more of them."""
    if gpus_per_node < 2:
        return None
    if node.intra_link is None or ("bridge" in node.intra_link and gpus_per_node > 2):
        return default_link(device, gpus_per_node)
    return find_link(node.intra_link)


def _host_memory(node: NodeType, layout: Layout, bytes_per_device: int) -> int:
    if node.host_ram_gib is None:
        return round(bytes_per_device * layout.gpus_per_node * _HOST_MEMORY_PER_GPU_MEMORY)
    return round(node.host_ram_gib * GIB * layout.gpus_per_node / node.gpus_per_node)


def _host_cores(node: NodeType, layout: Layout) -> int:
    if node.cpu_cores is None:
        return layout.gpus_per_node * _CORES_PER_GPU
    threads_per_core = 2 if node.cpu_unit == "vCPU" else 1  # a cloud's vCPU is one of the two threads of a core
    return max(1, node.cpu_cores * layout.gpus_per_node // node.gpus_per_node // threads_per_core)


def _carriers(device: Device) -> list[NodeType]:
    """Node types with this device, the best provider first; else with the same one of another memory."""
    own = [node for node in node_types() if node.gpu == device.name]
    return sorted(own or (node for node in node_types() if _is_same_but_memory(node.gpu, device.name)), key=_rank)


_MEMORY = re.compile(r"-\d+GB")


def _is_same_but_memory(name: str, other: str) -> bool:
    """Return whether two names differ in the memory at their end: `H100-SXM5-80GB` and `H100-SXM5-96GB`."""
    stems = [_MEMORY.split(text) for text in (name, other)]
    return all(len(parts) > 1 and not parts[-1] for parts in stems) and stems[0] == stems[1]


def _rank(node: NodeType) -> int:
    return _PROVIDER_RANK.get(node.provider, _CLOUD_RANK)


def _is_rack_scale(device: Device) -> bool:
    return "NVL72" in (device.nvlink_form or "")
