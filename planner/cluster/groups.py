"""Clusters whose nodes differ: groups of alike nodes, and the slower of each for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hardware_db.datasheets import find_link
from hardware_db.device import Link
from planner.cluster.nodes import PLAIN_NETWORK, scale_link
from planner.types.cluster import Cluster


def level(groups: Sequence[Cluster]) -> Cluster:
    """Return the cluster of equal nodes that all these nodes can pass for, which knows them as its `groups`.

    Its device is the slowest, its memory the least and its links the slowest of any. Where nodes have unlike numbers of
    GPUs it counts in parts of them, as many GPUs each as divide all, with links between parts of one node as between
    nodes.
    """
    if len(groups) == 1:
        return groups[0]
    size = math.gcd(*(group.gpus_per_node for group in groups))
    parts = [_cut(group, size) for group in groups]
    slowest = min(parts, key=_speed)
    slow_link = min(parts, key=_rate_between)
    gpus = sum(group.gpus for group in groups)
    is_one_type = len({group.node_type for group in groups}) == 1
    prices = [group.usd_per_gpu_hour for group in groups]
    mean = sum((price or 0.0) * group.gpus for price, group in zip(prices, groups, strict=True)) / gpus
    return replace(
        slowest,
        nodes=gpus // size,
        gpus_per_node=size,
        capacity_bytes=min(part.capacity_bytes for part in parts),
        intra_link=min((part.intra_link for part in parts), key=_rate_inside) if size > 1 else None,
        inter_link=slow_link.inter_link or find_link(PLAIN_NETWORK),
        nics_per_node=slow_link.nics_per_node,
        host_memory_bytes_per_node=min(part.host_memory_bytes_per_node for part in parts),
        host_cores_per_node=min(part.host_cores_per_node for part in parts),
        nvme_bytes_per_node=min(part.nvme_bytes_per_node for part in parts),
        node_type=slowest.node_type if is_one_type else "",
        usd_per_gpu_hour=None if None in prices else mean,
        assumed=_assumed(groups, size),
        groups=tuple(groups),
    )


def at_rates(cluster: Cluster, rates: Sequence[tuple[int, float]]) -> Cluster:
    """Return the cluster of devices that are unequally fast: how many, and how fast beside the others, in order.

    The fastest are as fast as the cluster's, which passes for one of its slowest. Each counts as a node of its own.
    """
    fastest = max(rate for _, rate in rates)
    one = _cut(cluster, 1)
    groups = [replace(one, nodes=devices, speed=cluster.speed * rate / fastest) for devices, rate in rates]
    if len({group.speed for group in groups}) == 1:
        return cluster
    return replace(cluster, speed=min(group.speed for group in groups), groups=tuple(groups))


def all_like(cluster: Cluster, group: Cluster) -> Cluster:
    """Return the cluster with the devices and hosts of one of its groups everywhere, between its own links."""
    part = _cut(group, cluster.gpus_per_node)
    return replace(
        cluster,
        device=group.device,
        speed=group.speed,
        capacity_bytes=group.capacity_bytes,
        host_memory_bytes_per_node=part.host_memory_bytes_per_node,
        host_cores_per_node=part.host_cores_per_node,
        nvme_bytes_per_node=part.nvme_bytes_per_node,
        node_type=group.node_type,
        groups=(),
    )


def name_group(group: Cluster) -> str:
    """Return what a group of nodes is called: `2 nodes of 8 x A100-SXM4-80GB`, `1 x L4 at 50% of its speed`."""
    return name_nodes(group.device.name, group.nodes, group.gpus_per_node, group.speed)


def name_nodes(device: str, nodes: int, gpus_per_node: int, speed: float = 1.0) -> str:
    """Return what alike nodes are called, as `name_group` does."""
    devices = f"{device}{'' if speed == 1 else f' at {speed:.0%} of its speed'}"
    if gpus_per_node == 1:
        return f"{nodes} x {devices}"
    return f"{'one node' if nodes == 1 else f'{nodes} nodes'} of {gpus_per_node} x {devices}"


def _cut(group: Cluster, size: int) -> Cluster:
    """Return the group in nodes of `size` GPUs, each with its part of a node's host and links."""
    share = size / group.gpus_per_node
    if share == 1:
        return group
    link, nics = group.inter_link, group.nics_per_node * share
    if link is not None and (nics < 1 or link.per == "node"):
        link = scale_link(link, share if link.per == "node" else nics)
    return replace(
        group,
        nodes=group.gpus // size,
        gpus_per_node=size,
        inter_link=link,
        nics_per_node=max(1, int(nics)),
        host_memory_bytes_per_node=int(group.host_memory_bytes_per_node * share),
        host_cores_per_node=max(1, int(group.host_cores_per_node * share)) if group.host_cores_per_node else 0,
        nvme_bytes_per_node=int(group.nvme_bytes_per_node * share),
    )


def _speed(cluster: Cluster) -> float:
    device = cluster.device
    peak = device.peak_flops("bf16") or device.peak_flops("fp16") or device.peak_flops("fp32") or 0.0
    return peak * cluster.speed


def _rate_inside(link: Link | None) -> float:
    """Return GB/s of a link; those of none, which nobody knows, are the least."""
    return 0.0 if link is None else link.busbw_gbs.get("all_reduce") or link.theoretical_gbs_per_direction or 0.0


def _rate_between(cluster: Cluster) -> float:
    link = cluster.inter_link
    return _rate_inside(link) * (1 if link is None or link.per == "node" else cluster.nics_per_node)


def _assumed(groups: Sequence[Cluster], size: int) -> str:
    sentences = [f"the nodes differ ({', '.join(map(name_group, groups))}): the slower of each counts for all"]
    if any(group.gpus_per_node != size for group in groups):
        parts = f"parts of {size} GPU{'s' * (size > 1)}"
        sentences.append(f"links are counted between {parts}, of which larger nodes have several")
    sentences += [group.assumed for group in groups if group.assumed]
    return "; ".join(dict.fromkeys(sentences))
