"""Seconds of collectives: latency plus volume over measured bus bandwidth, on the links that a group really crosses.

Ranks are numbered with tensor-parallel neighbours closest, then shards, replicas, and pipeline stages furthest apart.
Bus bandwidth is nccl-tests' term: an all-reduce of S bytes over n ranks takes 2(n-1)/n x S / bus, an all-gather or
reduce-scatter (n-1)/n x S / bus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hardware_db.device import Link
from hardware_db.units import GB
from planner.cluster import Cluster

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]

RING_SHARE_OF_LINK = 0.75
"""Bus over theoretical bandwidth where none was measured: A100 has 234.9/300, H100 370/450, PCIe 4 20.8/31.5."""

UNKNOWN_INTRA_BYTES_PER_S = 9 * GB
"""Bus bandwidth inside a node of unknown links: the slowest measured, GeForce cards staged through host memory."""

UNKNOWN_INTER_BYTES_PER_S = 1.0 * GB
"""Between nodes of unknown links: 10 Gb/s Ethernet, 1.25e9 bytes/s on the wire."""

DEFAULT_BASE_US, DEFAULT_STEP_US, DEFAULT_INTER_STEP_US = 6.6, 5.7, 14.0
"""NCCL's own tuning constants: a collective's fixed cost, a ring step over PCIe, a step between nodes (tuning.cc)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """`size` ranks that communicate, `per_node` of them in each node; `sharing` such groups leave a node together."""

    size: int
    per_node: int
    sharing: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.per_node)


def group(cluster: Cluster, size: int, stride: int) -> Group:
    """The group of `size` ranks that are `stride` apart."""
    per_node = max(1, min(size, cluster.gpus_per_node // stride if stride < cluster.gpus_per_node else 1))
    return Group(size=size, per_node=per_node, sharing=max(1, cluster.gpus_per_node // per_node))


def _figure(link: Link, name: str, ranks: int) -> float | None:
    """Measured bus bandwidth in GB/s for about this many ranks."""
    for limit, table in ((2, link.busbw_2_gpus), (4, link.busbw_4_gpus)):
        if ranks <= limit and table.get(name):
            return table[name]
    return link.busbw_gbs.get(name) or link.busbw_gbs.get("all_reduce")


def _link_bytes_per_s(link: Link, name: str, ranks: int) -> float | None:
    measured = _figure(link, name, ranks)
    if measured:
        return measured * GB
    theoretical = link.theoretical_gbs_per_direction
    return theoretical * RING_SHARE_OF_LINK * GB if theoretical else None


def intra_bytes_per_s(cluster: Cluster, name: Collective, ranks: int) -> float:
    """Bus bandwidth among `ranks` devices of one node."""
    if cluster.rates.collective_bytes_per_s:
        return cluster.rates.collective_bytes_per_s
    known = _link_bytes_per_s(cluster.intra_link, name, ranks) if cluster.intra_link else None
    return known or UNKNOWN_INTRA_BYTES_PER_S


def inter_bytes_per_s(cluster: Cluster, name: Collective) -> float:
    """Bytes/s that leave one node over all its NICs."""
    link = cluster.inter_link
    known = _link_bytes_per_s(link, name, 8) if link else None
    if known is None or link is None:
        return UNKNOWN_INTER_BYTES_PER_S
    return known * (1 if link.per == "node" else max(1, cluster.nics_per_node))


def _latency(link: Link | None, key: str, default: float) -> float:
    value = link.alpha_us.get(key) if link is not None and link.alpha_us else None
    return (float(value) if isinstance(value, int | float) else default) * 1e-6


def collective_seconds(cluster: Cluster, name: Collective, size_bytes: float, members: Group) -> float:
    """One collective over a tensor of `size_bytes` (the whole one, before or after sharding)."""
    if members.size < 2 or size_bytes <= 0:
        return 0.0
    trips = 2 if name == "all_reduce" else 1
    bandwidth = intra_bytes_per_s(cluster, name, members.per_node) if members.per_node > 1 else math.inf
    if members.nodes > 1:
        bandwidth = min(bandwidth, inter_bytes_per_s(cluster, name) / members.sharing)
    volume = trips * (members.size - 1) / members.size * size_bytes
    return _latency_seconds(cluster, trips, members) + volume / bandwidth


def _latency_seconds(cluster: Cluster, trips: int, members: Group) -> float:
    """A ring walks every rank; between nodes an all-reduce may take a tree instead, whichever is shorter."""
    if cluster.rates.collective_latency_s is not None and members.nodes == 1:
        return cluster.rates.collective_latency_s
    inside = _latency(cluster.intra_link, "per_step", DEFAULT_STEP_US) * (members.per_node - 1)
    seconds = _latency(cluster.intra_link, "base", DEFAULT_BASE_US) + trips * inside
    if members.nodes > 1:
        hop = _latency(cluster.inter_link, "per_step", DEFAULT_INTER_STEP_US)
        ring_steps = trips * (members.nodes - 1)
        seconds += hop * min(ring_steps, trips * 2 * math.ceil(math.log2(members.nodes)))
    return seconds


def neighbour_seconds(cluster: Cluster, size_bytes: float, stride: int) -> float:
    """Sending `size_bytes` to the rank `stride` away while every rank does the same (pipeline boundaries)."""
    if stride < cluster.gpus_per_node:
        link = cluster.intra_link
        rate = link.typical_p2p_gbs_per_direction if link else None
        bandwidth = rate * GB if rate else intra_bytes_per_s(cluster, "all_gather", 2)
        return _latency(link, "base", DEFAULT_BASE_US) + size_bytes / bandwidth
    bandwidth = inter_bytes_per_s(cluster, "all_gather") / cluster.gpus_per_node
    return _latency(cluster.inter_link, "per_step", DEFAULT_INTER_STEP_US) + size_bytes / bandwidth
