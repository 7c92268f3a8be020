"""The share of a datasheet's peak that real kernels reach, as a few named constants.

A matrix product is priced as `flops / (peak x ceiling) + traffic / bandwidth`: efficiency becomes a curve that rises
with the size of the product and needs no table. `GEMM_TRAFFIC` and `GEMM_CEILING["ampere"]` are fitted by
`scripts/fit/efficiency.py` to the 697 products of `hardware_db/measurements/gemm_efficiency.csv`; that file and
docs/explanation/cost-model-time.md say how well. Nothing here is a property of one model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from hardware_db.device import Device
from hardware_db.records import dataclass
from planner.cost.code_bases import TRANSFORMERS, Implementation, code_base
from planner.cost.memo import memo_by_fields
from planner.cost.precision import ScaledProducts, scaled_products
from planner.cost.timing.stacks import USUAL_MATMULS, Stack
from planner.types.cluster import Cluster, Factors, Rates
from planner.types.job import Job
from planner.vocabulary import SCALED_PRECISIONS, Precision

# Tile and wave quantization of matrix products on a GPU.


TILE_ROWS, TILE_COLUMNS = 128, 256
"""A tile of cuBLAS for large half-precision products; of three sizes the one that orders the published plans best."""

TILED = frozenset({"volta", "turing", "ampere", "ada", "hopper"})
"""Architectures whose rows this helps. Kernels measured on a B200 come out worse with it."""


class Waste(NamedTuple):
    """Work done over work asked for, 1 where nothing is wasted."""

    forward: float = 1.0
    backward: float = 1.0


NO_WASTE = Waste()


def multiprocessors(device: Device) -> int:
    """Cores that compute a tile each; 0 where products are not known to run in tiles."""
    return device.sm_count or 0 if device.architecture in TILED else 0


def waste_of(rows: float, columns: float, cores: int) -> float:
    """Tiles computed over tiles asked for: the last wave of tiles takes as long as a full one."""
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    return -(-tiles // cores) * cores * TILE_ROWS * TILE_COLUMNS / (rows * columns)


def block_waste(stack: Stack, tokens: float, tp: int, cores: int) -> Waste:
    """Return the mean over a dense block's products, by their operations.

    Queries, keys and values are taken as one product, gate and up projection too. The backward has two products each:
    for the input, tokens x inputs, and for the weight, outputs x inputs.
    """
    if not cores or not stack.norms or not stack.hidden or stack.matmuls.kernels > USUAL_MATMULS:
        return NO_WASTE
    hidden, width, attention = stack.hidden, stack.mlp_width / tp, stack.attention_width / tp
    projected = attention + 2 * stack.key_value_width / tp
    products = [(projected, hidden), (hidden, attention), (hidden, width)]
    products.append((2 * width if stack.gated else width, hidden))
    forward = backward = total = 0.0
    for outputs, inputs in products:
        work = outputs * inputs
        if work:
            total += work
            forward += work * waste_of(tokens, outputs, cores)
            backward += work * (waste_of(tokens, inputs, cores) + waste_of(outputs, inputs, cores))
    return Waste(forward=forward / total, backward=backward / total / 2)


GEMM_CEILING = {
    "volta": 0.78,
    "turing": 0.72,
    "ampere": 0.77,
    "ampere SXM4": 0.78,
    "ada": 0.78,
    "hopper": 0.65,
    "blackwell": 0.50,
    "cdna3": 0.47,
    "cpu": 0.50,
}
"""Share of the dense peak that large products sustain, by architecture, and by form where forms differ.

Ampere and Blackwell are fitted to kernels; the steps of A100-SXM4 ask for the same 0.77. Hopper and the V100-SXM2 are
fitted to whole steps of every publication. MI300X's products reach 620 TFLOP/s of 1,307 (SemiAnalysis, "MI300X vs H100
vs H200 Benchmark Part 1: Training", December 2024, as others report it). Volta otherwise, Turing, Ada and CPUs are
assumptions without a measurement.
"""

FP32_CEILING = {"volta": 0.93, "ampere SXM4": 0.97}
"""The same of products in fp32, which run beside tensor cores and within the power that a card may take: 13 of a V100
PCIe's 14.0 TFLOP/s, 19 of an A100's 19.5 (chsasank/device-benchmarks@02b8262e README.md, large products of torch).
Others are taken for products in 16 bits; GeForce cards of that table reach 70 to 88 %."""

EIGHT_BIT_SHARE = {"cdna3": 0.81}
"""Share of their own peak that 8-bit products reach over that of 16-bit ones, where it is known to be another: MI300X's
reach 990 TFLOP/s of 2,615 (the same measurement)."""

FP4_OVER_FP8 = 2.0
"""Rate of 4-bit products over 8-bit ones of the same device at most. GB300's sheet says 3, but steps of GB200 and GB300
gain alike (Megatron-Bridge's tables): the power that products may take is the same."""

OTHER_GEMM_CEILING = 0.55
"""The same for architectures without a measurement: below every one that has been measured."""

GEMM_TRAFFIC = 0.95
"""Times the bytes of its three matrices that a product moves through device memory, over the rate of a large copy."""

ATTENTION_CEILING = {"ampere": 0.53, "ampere SXM4": 0.65, "hopper": 0.36, "blackwell": 0.40, "cdna3": 0.31}
"""Share of the peak that fused attention's forward reaches over the products it really computes, by architecture.

Ampere and Blackwell are kernel measurements; A100-SXM4 and Hopper are fitted to whole steps of every publication.
MI300X's FlashAttention-2 is 10 to 20 % faster than an H100's (AMD's launch figures, SemiAnalysis, December 2023).
"""

OTHER_ATTENTION_CEILING = 0.40
"""The same for architectures without a measurement: the lowest that kernels by themselves have shown."""

ATTENTION_BACKWARD = 3.0
"""Fused attention: backward over forward time. Five products for two, at 5/6 of the forward's rate (see docs)."""

BACKWARD = 2.0
"""Backward over forward: one product for the input's gradient, one for the weight's (arXiv 2001.08361, section 2.1)."""

MEMORY_CEILING = 0.85
"""Share of the datasheet's memory bandwidth that elementwise kernels reach."""

DROPOUT_BYTES = 8
"""Bytes that `dsplan bench` counts for an element of its dropout, which is fp32: one read, one write."""

LARGE_BYTES = 1 << 30
"""Work at which a measured memory curve is read where the size of a kernel does not matter."""

CPU_PEAK_PER_CORE = 64e9
"""FLOP/s of one core of an unknown CPU in fp32: two 8-wide fused multiply-adds a cycle (AVX2) at 2 GHz."""

FP32_SHARE_OF_16_BIT = 1 / 16
"""Peak of fp32 over that of 16 bit where the datasheet has no fp32 figure: A100's 19.5 over 312."""

CPU_BANDWIDTH = 20e9
"""Bytes/s of an unknown CPU's memory: one channel of DDR4-2666 is 21.3e9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """Rates of one rank: FLOP/s of products and of fused attention, bytes/s, and how its code runs a block.

    `peak_flops` is the datasheet's dense peak of the compute dtype, or None if unknown; `plain_flops` what products
    reach that tensor cores refuse; `element_bytes` the width of an activation; `multiprocessors` compute a tile of a
    product each, 0 where they are not known to. `measured` curves count before the rates wherever there are any,
    divided by the cluster's `factors`, which the rates already hold. `serial` says that host, kernels and collectives
    take turns on the same cores. `scaled` says how linear layers multiply in 8 or 4 bits, at `scaled_flops`.
    """

    peak_flops: float | None
    gemm_flops: float
    attention_flops: float
    plain_flops: float
    memory_bytes_per_s: float
    element_bytes: int
    code: Implementation
    measured: Rates
    factors: Factors
    serial: bool
    multiprocessors: int
    scaled: ScaledProducts | None = None
    scaled_flops: float = 0.0

    def products(self, flops: float, moved_elements: float, kernels: float, waste: float = 1.0) -> float:
        """Seconds of `kernels` weight products of `flops` operations, whose matrices hold `moved_elements`.

        `waste` is the work that is done over the work that is asked for; a measured curve holds it already.
        """
        curve = self.measured.matmul
        if curve is not None:
            return kernels * curve.seconds(flops / kernels) / self.factors.compute
        traffic = moved_elements * self.element_bytes * GEMM_TRAFFIC
        return waste * flops / self.gemm_flops + traffic / self.memory_bytes_per_s

    def products_backward(self, flops: float, moved_elements: float, kernels: float, waste: float = 1.0) -> float:
        """Seconds of the two products that follow each of `products` in the backward."""
        curve = self.measured.matmul_backward
        if curve is not None:
            return 2 * kernels * curve.seconds(flops / kernels) / self.factors.compute
        return BACKWARD * self.products(flops, moved_elements, kernels, waste)

    def scaled_products(self, flops: float, moved_bytes: float, waste: float = 1.0) -> float:
        """Seconds of products of 8-bit or 4-bit operands, without the casts that make them."""
        return waste * flops / self.scaled_flops + moved_bytes * GEMM_TRAFFIC / self.memory_bytes_per_s

    def attention(self, executed_flops: float) -> float:
        """Seconds of fused attention's forward over the products that it really computes."""
        curve = self.measured.attention
        if curve is not None:
            return curve.seconds(2 * executed_flops) / self.factors.attention
        return executed_flops / (self.attention_flops * self.code.attention_share)

    def attention_backward(self, executed_flops: float) -> float:
        """Seconds of its backward."""
        curve = self.measured.attention_backward
        if curve is not None:
            return curve.seconds(2 * executed_flops) / self.factors.attention
        return ATTENTION_BACKWARD * self.attention(executed_flops)

    def elementwise(self, size_bytes: float, kernel_bytes: float) -> float:
        """Seconds of moving `size_bytes` in kernels that read and write `kernel_bytes` each."""
        curve = self.measured.memory
        if curve is None or kernel_bytes <= 0:
            return size_bytes / self.memory_bytes_per_s
        return size_bytes / curve.rate(kernel_bytes) / self.factors.memory

    def exponentials(self, size_bytes: float, kernel_bytes: float) -> float:
        """Return the seconds of kernels that take an exponential of every element, slower than a CPU's copying."""
        curve = self.measured.elementwise
        if curve is None or kernel_bytes <= 0:
            return self.elementwise(size_bytes, kernel_bytes)
        return size_bytes / curve.rate(kernel_bytes) / self.factors.memory

    def random(self, elements: float) -> float:
        """Seconds of a dropout over `elements` where it was measured; elsewhere its passes are counted."""
        curve = self.measured.dropout
        return 0.0 if curve is None else curve.seconds(DROPOUT_BYTES * elements) / self.factors.memory


def compute_dtype(device: Device, precision: Precision) -> str:
    """Return the dtype that products run in: what was asked for, or fp32 where the device has no faster unit for it.

    torch leaves TF32 off for matrix products unless told otherwise, so fp32 means fp32. Under fp8 and fp4 it is that of
    linear layers, against whose peak publications count an fp8 run (llm-foundry, torchtitan, dgxc); bf16's where the
    device's own is not known.
    """
    if precision in SCALED_PRECISIONS:
        narrow = ("fp4", "fp8") if precision == "fp4" else ("fp8",)
        return next((name for name in narrow if device.peak_flops(name)), compute_dtype(device, "bf16"))
    wanted = "bf16" if precision.startswith("bf16") else precision
    peak, single = device.peak_flops(wanted), device.peak_flops("fp32")
    return "fp32" if peak is None or (single is not None and single > peak) else wanted


def assumed_peak(cluster: Cluster) -> float:
    """FLOP/s in fp32 of a device whose datasheet has no such figure."""
    tensor = cluster.device.peak_flops("bf16") or cluster.device.peak_flops("fp16")
    if tensor:
        return tensor * FP32_SHARE_OF_16_BIT
    return CPU_PEAK_PER_CORE * max(1, cluster.host_cores_per_node // max(1, cluster.gpus_per_node))


def ceilings(device: Device) -> tuple[float, float]:
    """Shares of the peak that weight products and fused attention reach."""
    kind = "cpu" if device.is_cpu else device.architecture
    formed = f"{kind} {device.form}"
    products = GEMM_CEILING.get(formed) or GEMM_CEILING.get(kind, OTHER_GEMM_CEILING)
    return products, ATTENTION_CEILING.get(formed) or ATTENTION_CEILING.get(kind, OTHER_ATTENTION_CEILING)


def device_rates(
    cluster: Cluster,
    precision: Precision,
    code: Implementation = TRANSFORMERS,
    scaled: ScaledProducts | None = None,
) -> DeviceRates:
    """Rates of one device of the cluster; measured curves replace the datasheet's rates wherever there are any.

    The cluster's factors multiply both. `scaled` is how linear layers multiply under fp8 and fp4, whose other rates are
    bf16's.
    """
    device, measured, factors = cluster.device, cluster.rates, cluster.factors.at(cluster.speed)
    peak = device.peak_flops(compute_dtype(device, "bf16" if precision in SCALED_PRECISIONS else precision))
    products, attention = ceilings(device)
    dense = _fp32_ceiling(device, products) if _computes_in_fp32(device, precision) else products
    gemm = (peak or assumed_peak(cluster)) * dense * _product_share(device, code)
    # Large work takes these rates; only memory is asked for without a size.
    memory = measured.memory.rate(LARGE_BYTES) if measured.memory else None
    bandwidth = (device.memory_bandwidth_bytes_per_s or CPU_BANDWIDTH) * MEMORY_CEILING
    return DeviceRates(
        peak_flops=peak,
        gemm_flops=gemm * factors.compute,
        attention_flops=(peak or assumed_peak(cluster))
        * attention
        * factors.attention
        * _attention_share(device, code),
        plain_flops=min(gemm, (device.peak_flops("fp32") or assumed_peak(cluster)) * products) * factors.attention,
        memory_bytes_per_s=(memory or bandwidth) * factors.memory,
        element_bytes=4 if precision == "fp32" else 2,
        code=_rescale_launches(code, factors.launch, measured.launch_seconds),
        measured=measured,
        factors=factors,
        serial=device.is_cpu,
        multiprocessors=multiprocessors(device),
        scaled=scaled,
        scaled_flops=_scaled_flops(device, precision, factors) * _product_share(device, code) if scaled else 0.0,
    )


def rates_of(job: Job) -> DeviceRates:
    """Return the rates of a job's devices, for its precision and as its code runs."""
    traits = code_base(job.workload.code).traits(compiled=job.workload.compile)
    return _job_rates(job, traits.time, scaled_products(job))


@memo_by_fields("precision")
def _job_rates(job: Job, code: Implementation, scaled: ScaledProducts | None) -> DeviceRates:
    return device_rates(job.cluster, job.configuration.precision, code, scaled)


def _computes_in_fp32(device: Device, precision: Precision) -> bool:
    """Return whether products run in fp32: asked for, or for want of a faster unit."""
    return precision not in SCALED_PRECISIONS and compute_dtype(device, precision) == "fp32"


def _fp32_ceiling(device: Device, otherwise: float) -> float:
    """Return the share of its fp32 peak that large products of a device reach."""
    formed = f"{device.architecture} {device.form}"
    return FP32_CEILING.get(formed) or FP32_CEILING.get(device.architecture, otherwise)


def _product_share(device: Device, code: Implementation) -> float:
    """Return how fast a code base's products are on a device, over those that its ceilings are of."""
    return code.tuned_product_share if device.architecture in ("hopper", "blackwell") else 1.0


def _attention_share(device: Device, code: Implementation) -> float:
    """Return how fast a code base's own kernels of attention are on a device, over those that its ceiling is of."""
    return code.hopper_attention_share if device.architecture == "hopper" else 1.0


def _scaled_flops(device: Device, precision: Precision, factors: Factors) -> float:
    """FLOP/s of large products of 8-bit or 4-bit operands: the share of the peak that 16-bit ones reach of theirs."""
    peak = device.peak_flops(compute_dtype(device, precision)) or math.inf
    eight = device.peak_flops("fp8") or math.inf
    share = ceilings(device)[0] * EIGHT_BIT_SHARE.get(device.architecture, 1.0)
    return min(peak, FP4_OVER_FP8 * eight) * share * factors.compute


def _rescale_launches(code: Implementation, factor: float, measured: float | None) -> Implementation:
    """Return the code run by a host that launches `factor` times as fast as expected, or as measured.

    A measured launch scales a block's host time too: both are the same interpreter's work.
    """
    expected = code.kernel_host_seconds
    kernel = (measured or expected) / factor
    if kernel == expected:
        return code
    return replace(code, block_host_seconds=code.block_host_seconds * kernel / expected, kernel_host_seconds=kernel)
