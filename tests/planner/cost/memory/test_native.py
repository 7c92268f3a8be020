"""Our own ZeRO's memory as the planner tells it, beside what two real ranks measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest

from planner.search.estimate import estimate
from planner.types.plan_io import plan_from_dict

MEASURED: Mapping[tuple[str, str], tuple[int, int]] = {
    ("zero1", "fp32"): (112_000_000, 176_928_256),
    ("zero2", "fp32"): (112_000_000, 176_928_256),
    ("zero3", "fp32"): (84_100_000, 174_822_400),
    ("zero1", "bf16"): (112_000_000, 151_397_888),
    ("zero2", "bf16"): (112_000_000, 151_397_888),
    ("zero3", "bf16"): (84_100_000, 133_964_800),
}
"""Bytes of gpt2-14m on 2 ranks between steps and at the peak, by `scripts/bench/zero.py --bytes --models gpt2-14m`."""

WHOLE_TENSORS: Mapping[tuple[str, str], tuple[int, int]] = {
    ("zero1", "fp32"): (56_210_944, 127_333_888),
    ("zero1", "bf16"): (56_195_072, 97_683_968),
    ("zero3", "bf16"): (28_286_464, 78_199_296),
}
"""The same with Adafactor, which steps every tensor whole on the rank that owns it: the busier rank."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.bench import zero as bench_zero

    return bench_zero


@pytest.mark.parametrize(("strategy", "precision"), MEASURED)
def test_the_peak_is_as_measured(strategy: str, precision: str, bench: ModuleType) -> None:
    setting = bench.Setting(model="gpt2-14m", precision=precision, accumulation=1)
    memory = bench.subject_of(setting, strategy, "native").plan["memory"]
    resident, peak = MEASURED[strategy, precision]
    assert memory["peak_allocated_bytes"] == pytest.approx(peak, rel=0.06)
    states = memory["states"]
    assert states["parameters_bytes"] + states["optimizer_bytes"] == pytest.approx(resident, rel=0.02)


@pytest.mark.parametrize(("strategy", "precision"), WHOLE_TENSORS)
def test_whole_tensors_are_shared_out_as_measured(strategy: str, precision: str, bench: ModuleType) -> None:
    setting = bench.Setting(model="gpt2-14m", precision=precision, accumulation=1)
    configuration = plan_from_dict(bench.subject_of(setting, strategy, "native").plan).configuration
    length = configuration.sequence_length
    case = bench.Case(model="gpt2-14m", config=bench.SIZES["gpt2-14m"], strategy=strategy, world_size=2, length=length)
    request, _ = bench.question(case, "cpu")
    memory = estimate(request, replace(configuration, optimizer="adafactor")).memory
    resident, peak = WHOLE_TENSORS[strategy, precision]
    assert memory.states["parameters_bytes"] + memory.states["optimizer_bytes"] == pytest.approx(resident, rel=0.02)
    assert memory.peak_allocated_bytes == pytest.approx(peak, rel=0.06)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_never_more_than_deepspeed(strategy: str, accumulation: int, precision: str, bench: ModuleType) -> None:
    setting = bench.Setting(model="gpt2-101m", precision=precision, accumulation=accumulation)
    ours, theirs = (
        bench.subject_of(setting, strategy, backend).plan["memory"]["peak_allocated_bytes"]
        for backend in ("native", "deepspeed")
    )
    assert ours <= theirs
