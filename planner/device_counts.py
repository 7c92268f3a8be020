"""The same work on fewer devices or more: a cluster halved or doubled, node by node, then inside the last node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.cluster import Cluster
from planner.request import Request

LARGEST_NODE = 8
"""Devices up to which one node is doubled; beyond, there are more nodes."""


def device_counts(request: Request) -> Iterator[Request]:
    """The request itself; where cost counts, also on half the devices, a quarter and so on: what is paid is the time of
    every device."""
    yield request
    if request.objective == "cost":
        yield from fewer(request)


def fewer(request: Request) -> Iterator[Request]:
    """The request on half its devices, a quarter, and so on, down to one or an odd number."""
    cluster = halved(request.cluster)
    while cluster is not None:
        yield replace(request, cluster=cluster)
        cluster = halved(cluster)


def halved(cluster: Cluster) -> Cluster | None:
    """Half the nodes, or half of one node with half its host; None where that is no whole number."""
    if cluster.nodes % 2 == 0:
        return replace(cluster, nodes=cluster.nodes // 2)
    if cluster.nodes > 1 or cluster.gpus_per_node % 2:
        return None
    host = cluster.host_memory_bytes_per_node // 2
    return replace(cluster, gpus_per_node=cluster.gpus_per_node // 2, host_memory_bytes_per_node=host)


def doubled(cluster: Cluster) -> Cluster:
    """Twice the devices of a node that is not full yet, with twice its host; else twice the nodes."""
    if cluster.nodes == 1 and cluster.gpus_per_node * 2 <= LARGEST_NODE:
        host = cluster.host_memory_bytes_per_node * 2
        return replace(cluster, gpus_per_node=cluster.gpus_per_node * 2, host_memory_bytes_per_node=host)
    return replace(cluster, nodes=cluster.nodes * 2)
