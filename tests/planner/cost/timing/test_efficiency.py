"""Rates of devices, and the constants against the measurements they were fitted to."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from hardware_db.datasheets import devices, find_device
from hardware_db.device import Device
from planner.cost.code_bases import TRANSFORMERS
from planner.cost.precision import ScaledProducts
from planner.cost.timing import efficiency
from planner.cost.timing.efficiency import (
    ATTENTION_BACKWARD,
    GEMM_CEILING,
    GEMM_TRAFFIC,
    compute_dtype,
    device_rates,
)
from planner.types.cluster import Curve, Rates, constant_rate
from planner.vocabulary import PRECISIONS
from tests.planner.cost.timing.cases import cluster


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.fit import efficiency as fit_efficiency

    return fit_efficiency


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_has_rates(device: Device) -> None:
    for precision in PRECISIONS:
        rates = device_rates(replace(cluster(), device=device), precision)
        assert 1e9 < rates.gemm_flops < 3e15
        assert 1e9 < rates.attention_flops < 3e15
        assert 1e9 < rates.memory_bytes_per_s < 1e13
        assert rates.peak_flops is None or rates.gemm_flops < rates.peak_flops


def test_a_cpu_without_figures_counts_cores() -> None:
    unknown = Device(name="CPU", vendor="cpu", architecture="x86")
    two = replace(cluster(2), device=unknown, host_cores_per_node=8)
    rates = device_rates(two, "fp32")
    assert rates.peak_flops is None
    assert rates.gemm_flops == 4 * 64e9 * GEMM_CEILING["cpu"]


def test_bf16_on_a_device_without_it_runs_at_fp32() -> None:
    volta = find_device("V100-SXM2-16GB")
    assert compute_dtype(volta, "bf16") == "fp32"
    assert compute_dtype(volta, "fp16") == "fp16"
    assert compute_dtype(find_device("P40"), "fp16") == "fp32"
    assert compute_dtype(find_device("A100-SXM4-80GB"), "bf16-pure") == "bf16"


def test_fp8_gains_less_on_an_mi300x_than_its_datasheet_says() -> None:
    """SemiAnalysis' products: 990 TFLOP/s of 2615 in fp8 where bf16 has 620 of 1307."""
    device = replace(cluster(), device=find_device("MI300X"))
    rates = device_rates(
        device, "fp8", scaled=ScaledProducts(dtype="fp8", operand=1, activation_casts=0, weight_casts=0)
    )
    assert rates.scaled_flops / rates.gemm_flops == pytest.approx(990 / 620, rel=0.03)


def test_fp32_means_fp32_not_tf32() -> None:
    assert device_rates(cluster(), "fp32").peak_flops == 19.5e12


def test_measured_rates_replace_datasheet_ones() -> None:
    curves = Rates(matmul=constant_rate(1e13), memory=constant_rate(5e11), launch_seconds=20e-6)
    rates = device_rates(replace(cluster(), rates=curves), "bf16")
    assert rates.products(1e12, 1e9, 4) == pytest.approx(0.1)
    assert rates.products_backward(1e12, 1e9, 4) == pytest.approx(0.2)
    assert rates.memory_bytes_per_s == pytest.approx(5e11)
    assert rates.elementwise(1e9, 1e6) == pytest.approx(1e9 / 5e11)
    # A host that takes twice as long for a kernel takes twice as long for a block.
    assert rates.code.block_host_seconds == pytest.approx(2 * TRANSFORMERS.block_host_seconds)


def test_measured_products_are_read_at_their_own_size() -> None:
    slow_when_small = Curve(points=((1e9, 1e-3), (1e12, 1e-2)))
    rates = device_rates(replace(cluster(), rates=Rates(matmul=slow_when_small)), "bf16")
    assert rates.products(1e12, 0, 1) == pytest.approx(1e-2)
    assert rates.products(1e12, 0, 1000) == pytest.approx(1.0)


def test_product_constants_are_the_fitted_ones(fits: ModuleType) -> None:
    for name, key in (("A100-PCIE-80GB", "ampere"), ("B200-SXM-180GB", "blackwell")):
        rows = [row for row in fits.products() if row.device == name]
        assert GEMM_CEILING[key] == pytest.approx(fits.fit_gemm(rows[::2]), abs=0.02)
        assert fits.gemm_error(rows[1::2], GEMM_CEILING[key], GEMM_TRAFFIC) < 0.08


def test_attention_constants_are_the_fitted_ones(fits: ModuleType) -> None:
    ceilings = fits.attention_ceilings()
    forward, backward = ceilings["A100-PCIE-80GB"]
    assert efficiency.ATTENTION_CEILING["ampere"] == pytest.approx(forward, abs=0.01)
    assert pytest.approx(backward, rel=0.05) == ATTENTION_BACKWARD
    assert efficiency.ATTENTION_CEILING["blackwell"] == pytest.approx(ceilings["B200-SXM-180GB"][0], abs=0.02)
