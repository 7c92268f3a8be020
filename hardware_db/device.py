"""Accelerators, links and node types as values. The figures live in `datasheets/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from hardware_db.records import dataclass
from hardware_db.units import GB, GIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as the driver shows it; field names and units are those of `datasheets/devices.yaml`.

    `peak_tflops_dense` maps fp32/tf32/fp16/bf16/fp8/fp4 to 1e12 FLOP/s without sparsity, None where unsupported or
    unknown.
    """

    name: str
    aliases: tuple[str, ...] = ()
    vendor: str
    architecture: str
    form: str | None = None
    compute_capability: str | None = None
    gfx: str | None = None
    memory_nominal_gb: float | None = None
    memory_type: str | None = None
    memory_total_mib: float | None = None
    memory_total_gib: float | None = None
    torch_total_gib: float | None = None
    memory_bandwidth_gbs: float | None = None
    peak_tflops_dense: Mapping[str, float | None] = field(default_factory=dict)
    nvlink_generation: float | None = None
    nvlink_total_gbs: float | None = None
    nvlink_form: str | None = None
    pcie_generation: float | None = None
    pcie_lanes: int | None = None
    tdp_watts: float | None = None
    l2_cache_mb: float | None = None
    last_level_cache_mb: float | None = None
    sm_count: int | None = None
    devices_per_card: int | None = None
    supports_fp16: bool = True
    supports_bf16: bool = False
    supports_fp8: bool = False
    supports_flash_attention2: bool = False
    note: str | None = None
    source: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        """True for a processor, False for accelerators."""
        return self.vendor == "cpu"

    @property
    def total_bytes(self) -> int | None:
        """Memory the driver reports, in bytes, or None if the datasheet has no figure."""
        if self.memory_total_mib is not None:
            return round(self.memory_total_mib * MIB)
        return None if self.memory_nominal_gb is None else round(self.memory_nominal_gb * GB)

    @property
    def capacity_bytes(self) -> int | None:
        """Memory a process can use, bytes.

        What torch shows as total, or 98 % of the driver's total without that figure.
        """
        if self.torch_total_gib is not None:
            return round(self.torch_total_gib * GIB)
        return None if self.total_bytes is None else round(self.total_bytes * 0.98)

    @property
    def memory_bandwidth_bytes_per_s(self) -> float | None:
        """Datasheet bandwidth of device memory in bytes/s; None where no figure is known."""
        return None if self.memory_bandwidth_gbs is None else self.memory_bandwidth_gbs * GB

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s of `fp32`, `tf32`, `fp16`, `bf16`, `fp8` or `fp4`; None where unsupported or unknown."""
        teraflops = self.peak_tflops_dense.get(dtype)
        return None if teraflops is None else teraflops * 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link inside a node (per GPU) or between nodes (per NIC or per node, see `per`); GB/s are 1e9 bytes/s one way.

    `busbw_gbs` maps all_reduce/all_gather/reduce_scatter to large-message bus bandwidth as nccl-tests defines it.
    `alpha_us` holds `base` (fixed cost of a collective) and `per_step` (cost of one ring step), microseconds.
    """

    name: str
    aliases: tuple[str, ...] = ()
    scope: str
    generation: str | None = None
    theoretical_gbs_per_direction: float | None = None
    typical_p2p_gbs_per_direction: float | None = None
    busbw_gbs: Mapping[str, float | None] = field(default_factory=dict)
    busbw_nvls: Mapping[str, float | None] = field(default_factory=dict)
    busbw_2_gpus: Mapping[str, float | None] = field(default_factory=dict)
    busbw_4_gpus: Mapping[str, float | None] = field(default_factory=dict)
    size_curve_all_reduce: tuple[tuple[float | None, ...], ...] = ()
    alpha_us: Mapping[str, object] = field(default_factory=dict)
    line_rate_gbit: float | None = None
    per: str | None = None
    per_node_gbit: float | None = None
    note: str | None = None
    source: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeType:
    """A machine as it is bought or rented: accelerators, links, host, and where one is published, its price.

    `usual_nodes` is how many are meant by its name where nothing else is said: the trays of a rack.
    """

    name: str
    aliases: tuple[str, ...] = ()
    provider: str
    gpu: str
    gpus_per_node: int
    usual_nodes: int = 1
    intra_link: str | None = None
    inter_link: str | None = None
    inter_node_gbit: float | None = None
    nics: int | None = None
    cpu_cores: int | None = None
    cpu_unit: str | None = None
    host_ram_gib: float | None = None
    local_nvme_gb: float | None = None
    usd_per_hour: float | None = None
    priced_on: str | None = None
    note: str | None = None
    source: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    """Failures that end a job, as published for nodes of eight such GPUs, per 1,000 days of a node.

    `name` and `aliases` are how the names of the GPUs begin; `least` and `most` bound what publications saw or imply.
    """

    name: str
    aliases: tuple[str, ...] = ()
    per_1000_node_days: float
    least: float
    most: float
    said: str
    """Whose rate it is, in a few words."""
    source: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
