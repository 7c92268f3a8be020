"""The catalogue's link between the GPUs of one node: from what a probe found, or from the device alone."""

from __future__ import annotations

from hardware_db.datasheets import find_link, links, node_types
from hardware_db.device import Device, Link
from hardware_db.errors import UnknownName
from hardware_db.probe.machine import Gpu, GpuPair

# GeForce and TITAN drivers refuse peer-to-peer copies over PCIe, so traffic is staged through host memory (NCCL's SHM).
_STAGED = "pcie-host-staged"
_NO_P2P_BRANDS = ("geforce", "titan")
_FABRICS = {"xgmi": "xGMI", "on-die": "on-die"}  # the beginning of nvlink_form, and of Link.generation
_BRIDGED_CARDS = 2
_LINK_RATES_GBS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0, 6: 100.0}  # one NVLink, GB/s one way, by generation


def link_between(device: Device, gpus: tuple[Gpu, ...], pairs: tuple[GpuPair, ...]) -> Link | None:
    """Return the link between probed GPUs; None for one GPU.

    NVLink (xGMI) counts where every pair reaches each other over it: a ring that leaves it once runs at the slower
    rate, which is why four cards bridged two by two are joined by PCIe.
    """
    if len(gpus) < 2:
        return None
    indexes = {gpu.index for gpu in gpus}
    inside = [pair for pair in pairs if {pair.first, pair.second} <= indexes]
    if inside and all(pair.nvlink for pair in inside):
        fabric = _fabric_link(device, gpus)
        if fabric is not None:
            return fabric
    return _pcie_link(device, gpus, inside)


def default_link(device: Device, gpus: int) -> Link | None:
    """Return the link that machines with `gpus` of this device usually have; None for one GPU.

    A node type of the catalogue that carries the device decides. Without one: the vendor's links where they join all
    GPUs, PCIe of the device's generation otherwise. Bridges are extras that a plan must not take for granted.
    """
    if gpus < 2:
        return None
    name = _carried_link(device)
    if name is not None:
        return find_link(name)
    if device.nvlink_total_gbs and "bridge" not in (device.nvlink_form or ""):
        fabric = _nearest_fabric(device, (device.nvlink_total_gbs or 0) / 2, bridge=False)
        if fabric is not None:
            return fabric
    if any(brand in alias.lower() for alias in device.aliases for brand in _NO_P2P_BRANDS):
        return find_link(_STAGED)
    return pcie(device.pcie_generation, device.pcie_lanes)


def pcie(generation: float | None, lanes: int | None) -> Link | None:
    """Return the catalogue's PCIe link of this generation and width (x16 unless it is narrower), or None."""
    width = 16 if lanes is None or lanes >= 16 else 8
    try:
        return None if generation is None else find_link(f"pcie{generation:.0f}-x{width}")
    except UnknownName:
        return None


def _carried_link(device: Device) -> str | None:
    """Return the link of the largest node type with this device, which is not a bridge between two of its cards."""
    carriers = [node for node in node_types() if node.gpu == device.name and node.intra_link]
    whole = [node for node in carriers if "bridge" not in (node.intra_link or "")]
    return max(whole, key=lambda node: node.gpus_per_node).intra_link if whole else None


def _fabric_link(device: Device, gpus: tuple[Gpu, ...]) -> Link | None:
    """NVLink or xGMI of the GPUs, as fast as the links that are active on the GPU with the fewest."""
    datasheet = (device.nvlink_total_gbs or 0) / 2
    active = min((gpu.nvlink_links or 0 for gpu in gpus), default=0)
    rate = _LINK_RATES_GBS.get(int(device.nvlink_generation or 0), 0.0) * active
    bridge = (
        gpus[0].nvlink_to_switch is False and len(gpus) == _BRIDGED_CARDS and "bridge" in (device.nvlink_form or "")
    )
    carried = _carried_link(device)
    if not bridge and carried is not None and not carried.startswith("pcie") and (not rate or rate >= datasheet):
        return find_link(carried)
    return _nearest_fabric(device, min(rate, datasheet) if rate and datasheet else rate or datasheet, bridge=bridge)


def _nearest_fabric(device: Device, gbs: float, *, bridge: bool) -> Link | None:
    """Return the link of the device's own kind whose theoretical rate is nearest."""
    form = (device.nvlink_form or "").split(" ")
    kind = _FABRICS.get(form[0]) or f"NVLink {device.nvlink_generation or 0:.0f}"
    same = [
        link
        for link in links()
        if link.scope == "intra"
        and (link.generation or "").startswith(kind)
        and ("bridge" in (link.generation or "")) == bridge
        and link.theoretical_gbs_per_direction is not None
    ]

    def distance(link: Link) -> tuple[float, bool]:
        rack_scale = "nvl72" in link.name
        return abs((link.theoretical_gbs_per_direction or 0) - gbs), rack_scale != ("(NVL72)" in form)

    return min(same, key=distance, default=None)


def _pcie_link(device: Device, gpus: tuple[Gpu, ...], pairs: list[GpuPair]) -> Link | None:
    """PCIe of the slowest slot, or host memory where the driver refuses peer-to-peer copies between any two GPUs."""
    if any(pair.p2p not in (None, "ok") for pair in pairs):
        return find_link(_STAGED)
    generations = [gpu.pcie_generation_max for gpu in gpus if gpu.pcie_generation_max]
    widths = [gpu.pcie_width for gpu in gpus if gpu.pcie_width]
    return pcie(min(generations, default=device.pcie_generation), min(widths, default=device.pcie_lanes))
