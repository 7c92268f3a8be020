"""AMD GPUs from the files of the amdgpu driver; no library is needed. What those files do not report stays None."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

from hardware_db.datasheets import devices
from hardware_db.files import children, read_int, read_text
from hardware_db.probe.machine import Gpu, GpuPair, Host
from hardware_db.units import GIB, MIB

_AMD = 0x1002
# Below this a GPU is the graphics part of a processor, which ROCm does not train on.
_SMALLEST = 4 * GIB


def probe_amd(root: Path = Path("/")) -> tuple[tuple[Gpu, ...], tuple[GpuPair, ...]]:
    """Every AMD GPU with memory of its own, and which pairs share an xGMI hive."""
    cards = [path for path in children(root / "sys/class/drm") if re.fullmatch(r"card\d+", path.name)]
    folders = [card / "device" for card in sorted(cards, key=lambda path: int(path.name[4:]))]
    kept = [folder for folder in folders if _is_accelerator(folder)]
    targets = _gfx_targets(root)
    by_folder = targets if len(targets) == len(kept) else [None] * len(kept)
    gpus = tuple(_read(index, folder, by_folder[index]) for index, folder in enumerate(kept))
    hives = [read_int(folder / "xgmi_hive_info/xgmi_hive_id") for folder in kept]
    pairs = tuple(
        GpuPair(first=first, second=second, nvlink=bool(hives[first]) and hives[first] == hives[second])
        for first, second in combinations(range(len(kept)), 2)
    )
    return gpus, pairs


def _is_accelerator(folder: Path) -> bool:
    return read_int(folder / "vendor") == _AMD and (read_int(folder / "mem_info_vram_total") or 0) >= _SMALLEST


def _read(index: int, folder: Path, gfx: str | None) -> Gpu:
    total = read_int(folder / "mem_info_vram_total")
    used = read_int(folder / "mem_info_vram_used")
    return Gpu(
        index=index,
        name=read_text(folder / "product_name") or _name(gfx, total),
        vendor="amd",
        uuid=read_text(folder / "unique_id"),
        total_bytes=total,
        used_bytes=used,
        free_bytes=None if total is None or used is None else total - used,
        **_sensors(folder),
    )


def _sensors(folder: Path) -> dict[str, Any]:
    """Power in watts, temperature in degrees, and the PCIe slot; hwmon writes microwatts and millidegrees."""
    monitor = next(iter(children(folder / "hwmon")), folder / "hwmon")
    draw, limit = read_int(monitor / "power1_average"), read_int(monitor / "power1_cap")
    heat = read_int(monitor / "temp1_input")
    return {
        "power_draw_watts": None if draw is None else draw / 1e6,
        "power_limit_watts": None if limit is None else limit / 1e6,
        "temperature_celsius": None if heat is None else heat // 1000,
        "pcie_generation": _generation(read_text(folder / "current_link_speed")),
        "pcie_generation_max": _generation(read_text(folder / "max_link_speed")),
        "pcie_width": read_int(folder / "current_link_width"),
        "pcie_width_max": read_int(folder / "max_link_width"),
    }


def _generation(speed: str | None) -> int | None:
    """Return the PCIe generation of a rate such as `32.0 GT/s PCIe`."""
    rates = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
    return rates.get(speed.split()[0]) if speed else None


def _gfx_targets(root: Path) -> list[str | None]:
    """Return the instruction set of each GPU of the compute driver: 90402 is gfx942, 90010 is gfx90a."""
    targets: list[str | None] = []
    nodes = [path for path in children(root / "sys/class/kfd/kfd/topology/nodes") if path.name.isdigit()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        match = re.search(r"^gfx_target_version (\d+)$", read_text(node / "properties") or "", re.MULTILINE)
        version = int(match[1]) if match else 0
        if version:
            targets.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return targets


def _name(gfx: str | None, total_bytes: int | None) -> str:
    """Return the datasheet's name of the GPU with this instruction set and nearest memory."""
    same = [device for device in devices() if device.gfx is not None and device.gfx == gfx and device.memory_total_mib]
    if not same or total_bytes is None:
        return f"AMD {gfx or 'GPU'}"
    size_mib = total_bytes / MIB
    return min(same, key=lambda device: abs((device.memory_total_mib or 0) - size_mib)).name


# The GPU of an Apple chip, which shares the host's memory.


def probe_apple(host: Host) -> tuple[Gpu, ...]:
    """Return the chip's GPU on macOS with Apple silicon, nothing elsewhere."""
    if not host.system.startswith("Darwin") or not (host.cpu_model or "").startswith("Apple"):
        return ()
    total, free = host.memory_total_bytes, host.memory_available_bytes
    used = None if total is None or free is None else total - free
    name = host.cpu_model or "Apple GPU"
    return (Gpu(index=0, name=name, vendor="apple", total_bytes=total, free_bytes=free, used_bytes=used),)
