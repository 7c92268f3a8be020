"""Fewer devices or more for the same work: a cluster halved or doubled, node by node, then inside the last node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hardware_db.records import dataclass
from planner.cluster.budget import Bill, Budget, bill_of
from planner.search.request import Request
from planner.types.cluster import Cluster
from planner.types.plan import Plan

LARGEST_NODE = 8
"""Devices up to which one node is doubled; beyond, there are more nodes."""
MOST_DEVICES = 16_384
"""As many as public trainings have used (Llama 3, arXiv 2407.21783, section 3.3)."""


def device_counts(request: Request) -> Iterator[Request]:
    """Yield the request, and where cost counts also on half the devices, a quarter and so on: all devices are paid."""
    yield request
    if request.objective == "cost":
        yield from on_fewer_devices(request)


def on_fewer_devices(request: Request) -> Iterator[Request]:
    """Yield the request on half its devices, a quarter, and so on, down to one or an odd number.

    Machines that are rented whole, at a list price, stay whole.
    """
    cluster = halved(request.cluster)
    rented = request.cluster.usd_per_gpu_hour is not None and request.budget.usd_per_gpu_hour is None
    while cluster is not None and not (rented and cluster.gpus_per_node < request.cluster.gpus_per_node):
        yield replace(request, cluster=cluster)
        cluster = halved(cluster)


def halved(cluster: Cluster) -> Cluster | None:
    """Return half the nodes, or half of one node with half its host, or None if that is no whole number."""
    if cluster.nodes % 2 == 0:
        return replace(cluster, nodes=cluster.nodes // 2, groups=())
    if cluster.nodes > 1 or cluster.gpus_per_node % 2:
        return None
    host = cluster.host_memory_bytes_per_node // 2
    return replace(cluster, gpus_per_node=cluster.gpus_per_node // 2, host_memory_bytes_per_node=host, groups=())


def doubled(cluster: Cluster) -> Cluster:
    """Twice the devices of a node that is not full yet, with twice its host; else twice the nodes."""
    if cluster.nodes == 1 and cluster.gpus_per_node * 2 <= LARGEST_NODE:
        host = cluster.host_memory_bytes_per_node * 2
        return replace(cluster, gpus_per_node=cluster.gpus_per_node * 2, host_memory_bytes_per_node=host, groups=())
    return replace(cluster, nodes=cluster.nodes * 2, groups=())


# Numbers of devices on which a training ends in time, and its cost there.


Fastest = Callable[[Request], Plan | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDevices:
    """The fastest plan on a number of devices, what it costs, and whether it ends in time."""

    plan: Plan
    bill: Bill
    in_time: bool

    @property
    def gpus(self) -> int:
        """Devices that the plan takes."""
        return self.plan.configuration.world_size


def on_other_device_counts(request: Request, fastest: Fastest) -> tuple[OnDevices, ...]:
    """Return plans on fewer devices, down to the first that are too slow, and on more, up to what is in time.

    A global batch that was asked for stays, or is the next multiple of the devices; else it is as large on each of more
    devices. Fewest devices first; numbers on which nothing fits are left out.

    `fastest` returns the first plan of a request, or None if nothing fits.
    """
    here = _answer(request, fastest)
    less = []
    for option in on_fewer_devices(request):
        answer = _answer(option, fastest)
        if answer is None:
            break
        less.append(answer)
        if not answer.in_time:
            break
    more: list[OnDevices] = []
    if here is None or not here.in_time:
        for option in _more(request):
            answer = _answer(option, fastest)
            if answer is not None and answer.in_time:
                more += [_between(request, option, fastest) or answer]
                break
            more += [answer] if answer else []
    return (*reversed(less), *([here] if here else []), *more)


def _more(request: Request) -> Iterator[Request]:
    cluster = request.cluster
    while cluster.gpus * 2 <= MOST_DEVICES:
        cluster = doubled(cluster)
        yield on_devices(request, cluster)


def on_devices(request: Request, cluster: Cluster) -> Request:
    """Return the request on other devices, with a batch that divides over them.

    It is as large for each as it was where nobody asked for one.
    """
    batch = request.workload.global_batch_size
    if any("--global-batch" in text for text in request.defaults):
        batch = batch * cluster.gpus // request.cluster.gpus
    workload = replace(request.workload, global_batch_size=batch + -batch % cluster.gpus)
    return replace(request, cluster=cluster, workload=workload)


def _between(request: Request, enough: Request, fastest: Fastest) -> OnDevices | None:
    """Return three quarters of the devices that are enough, where those do too.

    They have to end in time, be whole nodes and need no larger batch.
    """
    cluster = enough.cluster
    fewer = on_devices(request, replace(cluster, nodes=cluster.nodes * 3 // 4, groups=()))
    if cluster.nodes % 4 or fewer.workload.global_batch_size > enough.workload.global_batch_size:
        return None
    answer = _answer(fewer, fastest)
    return answer if answer is not None and answer.in_time else None


def _answer(request: Request, fastest: Fastest) -> OnDevices | None:
    free = Budget(usd_per_gpu_hour=request.budget.usd_per_gpu_hour, tokens=request.budget.tokens)
    plan = fastest(replace(request, objective="throughput", budget=free, top=1, simplest_first=False))
    if plan is None:
        return None
    bill = bill_of(plan.configuration, plan.time.step_seconds, request.usd_per_gpu_hour, request.budget)
    in_time = plan.time.step_seconds <= request.budget.step_limit(request.workload)
    return OnDevices(plan=plan, bill=bill, in_time=in_time)
