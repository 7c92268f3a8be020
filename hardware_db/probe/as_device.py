"""Probed hardware as a `Device`: the datasheet's row where there is one, else figures of the driver."""

from __future__ import annotations

from dataclasses import replace

from hardware_db.datasheets import find_device
from hardware_db.device import Device
from hardware_db.errors import UnknownName
from hardware_db.probe.machine import Gpu, Host, MigDevice
from hardware_db.units import GB, GIB, MIB

# Fp32 FLOP per cycle and core: two fused multiply-add units (2 FLOP) of 16 (AVX-512), 8 (AVX2) or 4 lanes (NEON);
# without FMA an 8-lane add and an 8-lane multiply (AVX), or 4 lanes of each (SSE). Some cores have one 512-bit unit
# only and reach half of the first.
_FP32_PER_CYCLE = ((("avx512f",), 64), (("avx2", "fma"), 32), (("avx",), 16), (("asimd",), 16), (("sse2",), 8))
_AVX512_BF16_GAIN = 2  # VDPBF16PS multiplies twice as many lanes as the fp32 instruction
# Either of these is what oneDNN, and torch with it, asks of a processor for fp16: avx512_core_fp16 and avx2_vnni_2.
_FP16_UNITS = ({"avx512_fp16"}, {"avx_ne_convert", "avx_vnni_int8"})
_AMX_BF16_PER_CYCLE = 1024  # TDPBF16PS: 16 x 16 x 32 multiply-adds in 16 cycles
RATE_FLAGS = frozenset({"avx512_bf16", "amx_bf16"}).union(*(flags for flags, _ in _FP32_PER_CYCLE), *_FP16_UNITS)
"""Flags of a processor that decide its peak here, and what it computes in."""
_SAME_MEMORY = 0.03  # a datasheet total this near the driver's is the same card


def cpu_device(host: Host) -> Device:
    """Return this machine's processor as a device whose memory is what this process may use of the host's.

    Peak = physical cores x highest clock x FLOP per cycle of the widest SIMD unit in the flags, or None if the clock is
    hidden. Types without instructions of their own are computed in fp32. Memory bandwidth is unknown.
    """
    flags = host.cpu_flags
    cores = min(host.physical_cores or 1, host.usable_cores or host.physical_cores or 1)
    cycles_per_s = cores * (host.cpu_max_mhz or 0) * 1e6
    per_cycle = next((flops for wanted, flops in _FP32_PER_CYCLE if flags.issuperset(wanted)), 2)
    bf16 = per_cycle * (_AVX512_BF16_GAIN if "avx512_bf16" in flags else 1)
    if "amx_bf16" in flags:
        bf16 = _AMX_BF16_PER_CYCLE
    fp32 = cycles_per_s * per_cycle / 1e12 or None
    memory = host.memory_limit_bytes or host.memory_total_bytes or 0
    return Device(
        name="cpu",
        vendor="cpu",
        architecture=host.cpu_model or "unknown processor",
        memory_total_mib=memory / MIB,
        torch_total_gib=memory / GIB,
        peak_tflops_dense={"fp32": fp32, "fp16": fp32, "bf16": cycles_per_s * bf16 / 1e12 or None},
        supports_fp16=any(flags >= units for units in _FP16_UNITS),
        supports_bf16=True,
        note=f"peak of {cores} cores at {host.cpu_max_mhz or 0:.0f} MHz and {per_cycle} FLOP per cycle, derived",
    )


def gpu_device(gpu: Gpu) -> Device:
    """Return the datasheet of a probed GPU, with the driver's memory total where that differs.

    Derived figures without one.
    """
    try:
        device = find_device(gpu.name)
    except UnknownName:
        return _derive_device(gpu)
    if gpu.total_bytes and abs((device.total_bytes or 0) / gpu.total_bytes - 1) > _SAME_MEMORY:
        return replace(device, memory_total_mib=gpu.total_bytes / MIB, torch_total_gib=None)
    return device


def mig_device(gpu: Gpu, part: MigDevice) -> Device:
    """Return a MIG slice as a device: peaks by its share of multiprocessors, bandwidth by that of memory."""
    whole = gpu_device(gpu)
    compute = part.multiprocessors / whole.sm_count if part.multiprocessors and whole.sm_count else 0.0
    memory = part.total_bytes / gpu.total_bytes if part.total_bytes and gpu.total_bytes else 0.0
    peaks = {kind: None if peak is None else peak * compute or None for kind, peak in whole.peak_tflops_dense.items()}
    bandwidth = whole.memory_bandwidth_gbs
    return replace(
        whole,
        name=part.name,
        aliases=(),
        memory_total_mib=None if part.total_bytes is None else part.total_bytes / MIB,
        torch_total_gib=None,
        memory_bandwidth_gbs=None if bandwidth is None else bandwidth * memory or None,
        peak_tflops_dense=peaks,
        sm_count=part.multiprocessors,
        nvlink_total_gbs=0,
        nvlink_form="none",
    )


def _derive_device(gpu: Gpu) -> Device:
    """Return a GPU without a datasheet.

    Fp32 peak = CUDA cores x highest clock x 2; 16-bit peaks are taken equal to it, which tensor cores exceed.
    Bandwidth = bus width x highest memory clock x 2 (the clock NVML gives is half the data rate of HBM and GDDR).
    """
    capability = tuple(int(part) for part in (gpu.compute_capability or "0.0").split("."))
    fp32 = gpu.cuda_cores * gpu.sm_clock_max_mhz * 2e6 / 1e12 if gpu.cuda_cores and gpu.sm_clock_max_mhz else None
    bandwidth = None
    if gpu.memory_bus_bits and gpu.memory_clock_max_mhz:
        bandwidth = gpu.memory_bus_bits / 8 * gpu.memory_clock_max_mhz * 2e6 / GB
    return Device(
        name=gpu.name,
        vendor=gpu.vendor,
        architecture=f"compute capability {gpu.compute_capability}" if gpu.compute_capability else "unknown",
        compute_capability=gpu.compute_capability,
        memory_total_mib=None if gpu.total_bytes is None else gpu.total_bytes / MIB,
        memory_bandwidth_gbs=bandwidth,
        peak_tflops_dense={"fp32": fp32, "fp16": fp32, "bf16": fp32 if capability >= (8, 0) else None},
        pcie_generation=gpu.pcie_generation_max,
        pcie_lanes=gpu.pcie_width_max,
        tdp_watts=gpu.power_limit_watts,
        supports_bf16=capability >= (8, 0),
        supports_fp8=capability >= (8, 9),
        supports_flash_attention2=capability >= (8, 0),
        note="not in the catalogue; figures derived from what the driver reports",
    )
