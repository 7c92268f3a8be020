"""Seconds of collectives: latency plus volume over measured bus bandwidth, on the links that a group really crosses.

Ranks are numbered with tensor-parallel neighbours closest, then shards, replicas, and pipeline stages furthest apart.
Bus bandwidth is nccl-tests' term: an all-reduce of S bytes over n ranks takes 2(n-1)/n x S / bus, an all-gather or
reduce-scatter (n-1)/n x S / bus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hardware_db.device import Link
from hardware_db.units import GB
from planner.cluster import Cluster
from planner.timing.memo import memo_by_identity

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
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
    leaves a node over all its NICs. `measured_latency` replaces the ring's inside a node where it was measured.
    """

    intra: Mapping[Collective, tuple[float, float, float]]
    inter: Mapping[Collective, float]
    base: float
    intra_step: float
    inter_step: float
    measured_latency: float | None
    neighbour: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """`size` ranks that communicate, `per_node` of them in each node; `sharing` such groups leave a node together."""

    size: int
    per_node: int
    nodes: int
    sharing: int


def group(cluster: Cluster, size: int, stride: int) -> Group:
    """The group of `size` ranks that are `stride` apart."""
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


def _intra(cluster: Cluster, name: Collective) -> tuple[float, float, float]:
    measured, link, factor = cluster.rates.collective_bytes_per_s, cluster.intra_link, cluster.factors.intra_link
    if measured or link is None:
        rate = (measured or UNKNOWN_INTRA_BYTES_PER_S) * factor
        return rate, rate, rate
    two, four, more = (_link_bytes_per_s(link, name, ranks) or UNKNOWN_INTRA_BYTES_PER_S for ranks in (2, 4, 8))
    return two * factor, four * factor, more * factor


def _inter(cluster: Cluster, name: Collective) -> float:
    link = cluster.inter_link
    known = _link_bytes_per_s(link, name, 8) if link else None
    if known is None or link is None:
        return UNKNOWN_INTER_BYTES_PER_S
    return known * (1 if link.per == "node" else max(1, cluster.nics_per_node))


def _latency(link: Link | None, key: str, default_us: float) -> float:
    value = link.alpha_us.get(key) if link is not None and link.alpha_us else None
    return (float(value) if isinstance(value, int | float) else default_us) * 1e-6


@memo_by_identity
def fabric(cluster: Cluster) -> Fabric:
    """The links of a cluster, looked up once; measured rates replace datasheet figures inside a node.

    The cluster's factors multiply the rates, and divide the host's part of a collective's latency.
    """
    link, factors = cluster.intra_link, cluster.factors
    intra = {name: _intra(cluster, name) for name in COLLECTIVES}
    peer = link.typical_p2p_gbs_per_direction if link else None
    return Fabric(
        intra=intra,
        inter={name: _inter(cluster, name) * factors.inter_link for name in COLLECTIVES},
        base=COLLECTIVE_LAUNCH_SECONDS / factors.launch + _latency(link, "base", DEFAULT_BASE_US),
        intra_step=_latency(link, "per_step", DEFAULT_STEP_US),
        inter_step=_latency(cluster.inter_link, "per_step", DEFAULT_INTER_STEP_US),
        measured_latency=cluster.rates.collective_latency_s,
        neighbour=peer * GB * factors.intra_link if peer else intra["all_gather"][0],
    )


def collective_seconds(cluster: Cluster, name: Collective, size_bytes: float, members: Group) -> float:
    """One collective over a tensor of `size_bytes` (the whole one, before or after sharding)."""
    if members.size < 2 or size_bytes <= 0:
        return 0.0
    links = fabric(cluster)
    trips = 2 if name == "all_reduce" else 1
    local = members.per_node
    bandwidth = math.inf if local == 1 else links.intra[name][0 if local == 2 else 1 if local <= 4 else 2]
    if members.nodes > 1:
        bandwidth = min(bandwidth, links.inter[name] / members.sharing)
    volume = trips * (members.size - 1) / members.size * size_bytes
    return _latency_seconds(links, trips, members) + volume / bandwidth


def _latency_seconds(links: Fabric, trips: int, members: Group) -> float:
    """A ring walks every rank; between nodes a tree may be shorter."""
    if members.nodes == 1 and links.measured_latency is not None:
        return links.measured_latency
    seconds = links.base + trips * links.intra_step * (members.per_node - 1)
    if members.nodes > 1:
        steps = min(members.nodes - 1, 2 * (members.nodes - 1).bit_length())
        seconds += links.inter_step * trips * steps
    return seconds


def neighbour_seconds(cluster: Cluster, size_bytes: float, stride: int) -> float:
    """Sending `size_bytes` to the rank `stride` away while every rank does the same (pipeline boundaries)."""
    links = fabric(cluster)
    if stride < cluster.gpus_per_node:
        return links.base + size_bytes / links.neighbour
    return links.inter_step + size_bytes * cluster.gpus_per_node / links.inter["all_gather"]
