"""Clusters of this machine: its GPUs with the memory that is free now, a MIG slice, or its processor."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hardware_db.datasheets import find_link, links
from hardware_db.device import Device, Link
from hardware_db.probe import Gpu, GpuProcess, Host, Machine, MigDevice
from hardware_db.probe.as_device import cpu_device, gpu_device, mig_device
from hardware_db.topology import link_between
from hardware_db.units import format_bytes
from planner.cluster.nodes import Layout, default_node_type, network
from planner.errors import ContradictoryRequest
from planner.types.cluster import Cluster

CPU_RANKS = 2
_UNEVEN = 0.95  # GPUs whose free memory is within this of the most count as equal
_SLOWING = ("slowdown", "power brake")
_RDMA = {"infiniband": "ib-", "roce": "roce-", "ethernet": "eth-"}
_PLAIN_NETWORK = "eth-25"


def probed_cluster(machine: Machine, ranks: int | None = None) -> Cluster:
    """Return the cluster that a process started here trains on: all GPUs, a MIG slice, or `ranks` (2) CPU processes.

    `ranks` is the world size: the first GPUs where it is fewer than there are, several such nodes where it is more.

    Raises:
        ContradictoryRequest: more ranks than GPUs, and not a multiple of them.
    """
    return of_machine(_cluster(machine, machine.usable_gpus, ranks), machine)


def of_machine(cluster: Cluster, machine: Machine) -> Cluster:
    """Return the cluster, which knows what machine it is."""
    return replace(cluster, machine=machine)


def _cluster(machine: Machine, gpus: tuple[Gpu, ...], ranks: int | None) -> Cluster:
    if not gpus:
        return mig_cluster(machine) or cpu_cluster(machine.host, ranks or CPU_RANKS)
    if ranks is None or ranks <= len(gpus):
        return gpu_cluster(machine, gpus[:ranks])
    if ranks % len(gpus):
        raise ContradictoryRequest(
            f"{ranks} ranks do not divide over nodes of {len(gpus)} GPUs; start a multiple of {len(gpus)}"
        )
    return gpu_cluster(machine, gpus, nodes=ranks // len(gpus))


def gpu_cluster(machine: Machine, gpus: tuple[Gpu, ...], nodes: int = 1) -> Cluster:
    """`nodes` nodes like this machine with these of its GPUs. Unequal GPUs are planned as the least of them."""
    device = min((gpu_device(gpu) for gpu in gpus), key=_speed)
    layout = Layout(nodes=nodes, gpus_per_node=len(gpus))
    inter_link, nics, guess = _network(machine.host, device, layout)
    host = machine.host
    return Cluster(
        device=device,
        nodes=nodes,
        gpus_per_node=len(gpus),
        capacity_bytes=min(_free(gpu) for gpu in gpus),
        intra_link=link_between(device, gpus, machine.pairs),
        inter_link=inter_link,
        nics_per_node=nics,
        host_memory_bytes_per_node=host.memory_available_bytes or 0,
        host_cores_per_node=host.usable_cores or 0,
        nvme_bytes_per_node=max((disk.free_bytes for disk in host.disks if disk.kind == "nvme"), default=0),
        assumed="; ".join(sentence for sentence in (*_remarks(machine, gpus, device), guess) if sentence),
        probed=True,
    )


def mig_cluster(machine: Machine) -> Cluster | None:
    """Return the largest MIG slice as one device (collectives do not work between slices), or None without slices."""
    slices = _slices(machine)
    if not slices:
        return None
    gpu, part = slices[0]
    host = machine.host
    return Cluster(
        device=mig_device(gpu, part),
        nodes=1,
        gpus_per_node=1,
        capacity_bytes=part.free_bytes or 0,
        host_memory_bytes_per_node=host.memory_available_bytes or 0,
        host_cores_per_node=host.usable_cores or 0,
        nvme_bytes_per_node=max((disk.free_bytes for disk in host.disks if disk.kind == "nvme"), default=0),
        assumed=f"planned for one of {len(slices)} MIG slices, since collectives do not work between slices",
        probed=True,
    )


def largest_slice(machine: Machine) -> MigDevice | None:
    """Return the MIG slice with the most free memory, which `mig_cluster` plans for, or None without slices."""
    return next((part for _, part in _slices(machine)), None)


def _slices(machine: Machine) -> list[tuple[Gpu, MigDevice]]:
    """Return the slices of visible GPUs, those with most free memory first."""
    slices = [(gpu, part) for gpu in machine.gpus if gpu.visible and not gpu.lost for part in gpu.mig_devices]
    return sorted(slices, key=lambda pair: pair[1].free_bytes or 0, reverse=True)


def cpu_cluster(host: Host, ranks: int, nodes: int = 1) -> Cluster:
    """`ranks` processes on each of `nodes` processors like this one, which share its memory and its cores evenly."""
    whole = cpu_device(host)
    peaks = {kind: None if peak is None else peak / ranks for kind, peak in whole.peak_tflops_dense.items()}
    available = host.memory_available_bytes or host.memory_total_bytes or 0
    remarks = [f"{_PLAIN_NETWORK} between nodes"] if nodes > 1 else []
    if not _speed(whole):
        remarks.append("the processor's clock is hidden: times are a guess")
    return Cluster(
        device=replace(whole, peak_tflops_dense=peaks),
        nodes=nodes,
        gpus_per_node=ranks,
        capacity_bytes=available // ranks,
        inter_link=find_link(_PLAIN_NETWORK) if nodes > 1 else None,
        host_memory_bytes_per_node=available,
        host_cores_per_node=host.usable_cores or 1,
        assumed="; ".join(remarks),
        probed=True,
    )


def _free(gpu: Gpu) -> int:
    """Bytes one more process may use on the GPU now."""
    usable = gpu_device(gpu).capacity_bytes
    free = gpu.free_bytes or 0
    return free if usable is None else min(free, usable)


def _speed(device: Device) -> float:
    return device.peak_flops("bf16") or device.peak_flops("fp16") or device.peak_flops("fp32") or 0.0


def _remarks(machine: Machine, gpus: tuple[Gpu, ...], device: Device) -> list[str]:
    """Return what a plan for these GPUs has to say about them, a sentence each."""
    names = Counter(gpu.name for gpu in gpus)
    remarks = []
    if len(names) > 1:
        mix = ", ".join(f"{count} x {name}" for name, count in names.items())
        remarks.append(f"the GPUs differ ({mix}): every rank is planned as {device.name}")
    remarks += _uneven(gpus)
    if not device.source:
        how = "its peaks are derived from its cores and clocks" if _speed(device) else "its times are a guess"
        remarks.append(f"{device.name} is not in the catalogue: {how}")
    for gpu in machine.gpus:
        if gpu.lost:
            remarks.append(f"GPU {gpu.index} does not answer and is left out")
        elif gpu.mig_enabled and gpu.visible:
            remarks.append(f"GPU {gpu.index} is cut into MIG slices and is left out")
    for gpu in gpus:
        slowing = [reason for reason in gpu.throttle_reasons or () if any(word in reason for word in _SLOWING)]
        if slowing:
            remarks.append(f"GPU {gpu.index} is throttled ({', '.join(slowing)}) and will hold the others back")
    return remarks


def _uneven(gpus: tuple[Gpu, ...]) -> list[str]:
    least, most = min(gpus, key=_free), max(gpus, key=_free)
    usable = gpu_device(least).capacity_bytes or least.total_bytes or 0
    if _free(least) >= _UNEVEN * usable and _free(least) >= _UNEVEN * _free(most):
        return []
    holders = [f"process {process.pid} holds {_held(process)}" for process in least.processes or ()]
    because = f" ({', '.join(holders)})" if holders else ""
    return [f"GPU {least.index} has only {format_bytes(_free(least))} free{because}: every rank is planned for that"]


def _held(process: GpuProcess) -> str:
    return "an unknown amount" if process.used_bytes is None else format_bytes(process.used_bytes)


def _network(host: Host, device: Device, layout: Layout) -> tuple[Link | None, int, str]:
    """Return the link between nodes like this one, how many a node has, and what was guessed; nothing for one node."""
    if layout.nodes == 1:
        return None, 1, ""
    for kind, prefix in _RDMA.items():
        rates = [nic.gbit for nic in host.nics if nic.kind == kind and nic.gbit]
        if rates:
            same = [link for link in links() if link.name.startswith(prefix) and link.line_rate_gbit]
            best = max(rates)
            nearest = min(same, key=lambda link: abs((link.line_rate_gbit or 0) - best))
            return nearest, rates.count(best), ""
    node = default_node_type(device, layout.gpus_per_node)
    if node is not None:
        link, nics = network(device, layout, node)
        return link, nics, f"the network between nodes is taken from {node.name}"
    return find_link(_PLAIN_NETWORK), 1, f"the network between nodes is taken to be {_PLAIN_NETWORK}"
