"""Seconds of collectives: latency plus volume over measured bus bandwidth, on the links that a group really crosses.

Ranks are numbered with tensor-parallel neighbours closest, then shards, replicas, and pipeline stages furthest apart.
Bus bandwidth is nccl-tests' term: an all-reduce of S bytes over n ranks takes 2(n-1)/n x S / bus, an all-gather or
reduce-scatter (n-1)/n x S / bus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from hardware_db.device import Link
from hardware_db.records import dataclass
from hardware_db.units import GB
from planner.cost.memo import memo_by_identity
from planner.types.cluster import Cluster

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

RING_SHARE_OF_LINK = 0.75
"""Bus over theoretical bandwidth where none was measured: A100 has 234.9/300, H100 370/450, PCIe 4 20.8/31.5."""

UNKNOWN_INTRA_BYTES_PER_S = 9 * GB
"""Bus bandwidth inside a node of unknown links: the slowest measured, GeForce cards staged through host memory."""

UNKNOWN_INTER_BYTES_PER_S = 1.0 * GB
"""Between nodes of unknown links: 10 Gb/s Ethernet, 1.25e9 bytes/s on the wire."""

DEFAULT_BASE_US, DEFAULT_STEP_US, DEFAULT_INTER_STEP_US = 6.6, 5.7, 14.0
"""NCCL's own tuning constants: a collective's fixed cost, a ring step over PCIe, a step between nodes (tuning.cc)."""

COLLECTIVE_LAUNCH_SECONDS = 20e-6
"""Launching a collective, on top of NCCL's constants: about what 1 MiB all-reduces over 2 to 8 A100s take
beyond those, chosen on the rows it is tested on (`hardware_db/measurements/all_reduce_nvlink.csv`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The links of a cluster as rates (bytes/s) and latencies (seconds).

    `intra` maps a collective to bus bandwidths inside a node for 2, for 3 or 4, and for more ranks; `inter` to what
    leaves a node over all its NICs. `in_switch` is what an all-reduce inside NVLink's switches takes in, 0 where they
    cannot, `switch_latency` what it takes at least.
    """

    intra: Mapping[Collective, tuple[float, float, float]]
    inter: Mapping[Collective, float]
    base: float
    intra_step: float
    inter_step: float
    neighbour: float
    in_switch: float
    switch_latency: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """`size` ranks that communicate, `per_node` of them in each node; `sharing` such groups leave a node together."""

    size: int
    per_node: int
    nodes: int
    sharing: int


def group(cluster: Cluster, size: int, stride: int) -> Group:
    """Return the group of `size` ranks that are `stride` apart."""
    per_node = max(1, min(size, cluster.gpus_per_node // stride if stride < cluster.gpus_per_node else 1))
    return Group(
        size=size,
        per_node=per_node,
        nodes=math.ceil(size / per_node),
        sharing=max(1, cluster.gpus_per_node // per_node),
    )


def _link_bytes_per_s(link: Link, name: Collective, ranks: int) -> float | None:
    """Measured bus bandwidth for about this many ranks, else a share of the link's theoretical rate."""
    tables = [link.busbw_gbs]
    if ranks <= 4:
        tables.insert(0, link.busbw_4_gpus)
    if ranks <= 2:
        tables.insert(0, link.busbw_2_gpus)
    measured = next((table[name] for table in tables if table.get(name)), None) or link.busbw_gbs.get("all_reduce")
    if measured:
        return measured * GB
    theoretical = link.theoretical_gbs_per_direction
    return theoretical * RING_SHARE_OF_LINK * GB if theoretical else None


@memo_by_identity
def _bus_bytes_per_s(link: Link | None) -> dict[Collective, tuple[float | None, ...]]:
    """Return what each collective reaches on 2, 4 and 8 GPUs, None where the link's rate is not known."""
    if link is None:
        return dict.fromkeys(COLLECTIVES, (None, None, None))
    return {name: tuple(_link_bytes_per_s(link, name, ranks) for ranks in (2, 4, 8)) for name in COLLECTIVES}


def _in_switch(link: Link | None) -> float:
    """Bytes/s of the tensor that NVLink's switches reduce (NVLS); the link's bus bandwidth is that of so many GPUs."""
    bus, gpus = (link.busbw_nvls.get(name) if link else None for name in ("all_reduce", "gpus"))
    return bus * GB / crossings("all_reduce", int(gpus)) if bus and gpus else 0.0


def _latency(link: Link | None, key: str, default_us: float) -> float:
    value = link.alpha_us.get(key) if link is not None and link.alpha_us else None
    return (float(value) if isinstance(value, int | float) else default_us) * 1e-6


@memo_by_identity
def fabric(cluster: Cluster) -> Fabric:
    """Return the links of a cluster, looked up once.

    The cluster's factors multiply the rates, and divide the host's part of a collective's latency.
    """
    link, factors = cluster.intra_link, cluster.factors
    nics = 1 if cluster.inter_link and cluster.inter_link.per == "node" else max(1, cluster.nics_per_node)
    intra, inter = {}, {}
    for name, inside in _bus_bytes_per_s(link).items():
        two, four, more = ((rate or UNKNOWN_INTRA_BYTES_PER_S) * factors.intra_link for rate in inside)
        intra[name] = two, four, more
    for name, (*_, between) in _bus_bytes_per_s(cluster.inter_link).items():
        inter[name] = (between * nics if between else UNKNOWN_INTER_BYTES_PER_S) * factors.inter_link
    peer = link.typical_p2p_gbs_per_direction if link else None
    return Fabric(
        intra=intra,
        inter=inter,
        base=COLLECTIVE_LAUNCH_SECONDS / factors.launch + _latency(link, "base", DEFAULT_BASE_US),
        intra_step=_latency(link, "per_step", DEFAULT_STEP_US),
        inter_step=_latency(cluster.inter_link, "per_step", DEFAULT_INTER_STEP_US),
        neighbour=peer * GB * factors.intra_link if peer else intra["all_gather"][0],
        in_switch=_in_switch(link) * factors.intra_link,
        switch_latency=_latency(link, "nvls", 0.0),
    )


def crossings(name: Collective, ranks: int) -> float:
    """Bytes that pass a rank's link per byte of the whole tensor: what nccl-tests divides by to get bus bandwidth."""
    if name in ("broadcast", "point_to_point"):
        return 1.0
    return (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks


def collective_seconds(cluster: Cluster, name: Collective, size_bytes: float, members: Group) -> float:
    """One collective over a tensor of `size_bytes` (the whole one, before or after sharding)."""
    if members.size < 2 or size_bytes <= 0:
        return 0.0
    measured = _measured_seconds(cluster, name, size_bytes, members)
    if measured is not None:
        return measured
    links = fabric(cluster)
    if name == "all_to_all":
        return _all_to_all_seconds(links, size_bytes, members)
    local = members.per_node
    bandwidth = math.inf if local == 1 else links.intra[name][0 if local == 2 else 1 if local <= 4 else 2]
    if members.nodes > 1:
        bandwidth = min(bandwidth, links.inter[name] / members.sharing)
    ring = _latency_seconds(links, name, members) + crossings(name, members.size) * size_bytes / bandwidth
    if name == "all_reduce" and members.nodes == 1 and links.in_switch:
        return min(ring, links.base + links.switch_latency + size_bytes / links.in_switch)
    return ring


def _all_to_all_seconds(links: Fabric, size_bytes: float, members: Group) -> float:
    """Return the seconds in which every rank sends each other one an equal part of its `size_bytes`.

    Those of other nodes get theirs over its own share of the NICs, those of its own node beside that.
    """
    local, size = members.per_node, members.size
    return _sent_apart(links, size_bytes * (local - 1) / size, size_bytes * (size - local) / size, members)


def dispatch_seconds(cluster: Cluster, size_bytes: float, copies: float, other_nodes: float, members: Group) -> float:
    """Return the seconds of sending tokens of `size_bytes` to `copies` experts each, once to every node.

    Each token crosses to the `other_nodes` that have experts of it over the NICs, once, and from there to the ranks of
    the node over the links inside (DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2).
    """
    local = members.per_node
    inside = size_bytes * copies * (local - 1) / local
    return _sent_apart(fabric(cluster), inside, size_bytes * other_nodes, members)


def _sent_apart(links: Fabric, inside_bytes: float, between_bytes: float, members: Group) -> float:
    """Return the seconds of what every rank sends inside its node and, over its share of the NICs, beyond it."""
    local = members.per_node
    inside = inside_bytes / links.intra["all_to_all"][0 if local == 2 else 1 if local <= 4 else 2]
    if members.nodes == 1:
        return links.base + links.intra_step + inside
    between = between_bytes * local * members.sharing / links.inter["all_to_all"]
    return links.base + links.inter_step + max(inside, between)


def _measured_seconds(cluster: Cluster, name: Collective, size_bytes: float, members: Group) -> float | None:
    """Return what this machine took with all its ranks at work; a smaller group in proportion to what it moves.

    Without the operation itself an all-reduce stands in, which is a reduce-scatter and an all-gather.
    """
    curves = cluster.rates.collectives
    if not curves:
        return None
    ranks = cluster.gpus if members.nodes > 1 else cluster.gpus_per_node
    if members.nodes > 1 and members.size < ranks:
        return None
    factor = cluster.factors.inter_link if members.nodes > 1 else cluster.factors.intra_link
    share = crossings(name, members.size) / crossings(name, ranks) / factor
    curve = curves.get((name, ranks))
    if curve is not None:
        return curve.seconds(size_bytes) * share
    whole = curves.get(("all_reduce", ranks))
    return None if whole is None else whole.seconds(size_bytes) / 2 * share


def _latency_seconds(links: Fabric, name: Collective, members: Group) -> float:
    """Return the latency: a ring walks every rank; all-reduces between nodes may take a tree (NCCL, tuning.cc)."""
    if name == "point_to_point":
        return links.base + (links.inter_step if members.nodes > 1 else links.intra_step)
    trips = 2 if name == "all_reduce" else 1
    inside, between = members.nodes * (members.per_node - 1), members.nodes - 1
    ring = inside * links.intra_step + between * links.inter_step
    if name != "all_reduce" or not between:
        return links.base + trips * ring
    tree = (members.per_node - 1) * links.intra_step + between.bit_length() * links.inter_step
    return links.base + trips * min(ring, tree)


def neighbour_seconds(cluster: Cluster, size_bytes: float, stride: int) -> float:
    """Return the seconds of sending `size_bytes` to the rank `stride` away while every rank does the same."""
    curve = cluster.rates.collectives.get(("point_to_point", cluster.gpus_per_node))
    if curve is not None and cluster.nodes == 1:
        return curve.seconds(size_bytes) / cluster.factors.intra_link
    links = fabric(cluster)
    if stride < cluster.gpus_per_node:
        return links.base + size_bytes / links.neighbour
    return links.inter_step + size_bytes * cluster.gpus_per_node / links.inter["all_gather"]
