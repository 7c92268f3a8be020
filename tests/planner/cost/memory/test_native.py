"""Our own ZeRO's memory as the planner tells it, beside what two real ranks measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest
from torch import nn

from planner.search.estimate import estimate
from planner.search.request import WorkOptions, make_request
from planner.types.plan_io import plan_from_dict
from planner.vocabulary import Strategy
from scripts.measure.machines import measured_cluster
from strategies.integrations.ddp_script import configuration_for
from strategies.tracing.live import facts_from_module

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


TABLED = {"n_embd": 256, "n_layer": 12, "n_head": 4, "vocab_size": 40000, "n_positions": 64}
MIDDLE: Mapping[tuple[str, str], int] = {
    ("zero1", "fp32"): 359_800_000,
    ("zero1", "bf16"): 298_300_000,
    ("zero2", "fp32"): 331_500_000,
    ("zero2", "bf16"): 264_400_000,
}
"""Peak bytes of such a GPT-2 with three micro-batches of 32 words on 2 ranks, by `scripts/bench/zero.py --bytes`."""
ONCE: Mapping[tuple[str, str], int] = {("zero2", "fp32"): 307_300_000, ("zero2", "bf16"): 232_600_000}
"""The same with one micro-batch, by `scripts.measure.measured_run.measure_subject`."""


WITHOUT_BLOCKS: Mapping[Strategy, int] = {"zero1": 4_557_312, "zero2": 4_557_312, "zero3": 5_118_976}
"""Peak bytes of a script's MLP of 32, 512, 512 and 2 features with 16 samples a rank, AdamW in fp32, on 2 ranks, by
`dsplan run --strategy`: while the largest gradient is copied into the bucket of all."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.bench import zero as bench_zero

    return bench_zero


@pytest.mark.parametrize(("strategy", "precision"), MEASURED)
def test_the_peak_is_as_measured(strategy: str, precision: str, bench: ModuleType) -> None:
    setting = bench.Setting(model="gpt2-14m", precision=precision, accumulation=1)
    memory = bench.subject_of(setting, strategy, "native").plan["memory"]
    resident, peak = MEASURED[strategy, precision]
    assert memory["peak_allocated_bytes"] == pytest.approx(peak, rel=0.01)
    states = memory["states"]
    assert states["parameters_bytes"] + states["optimizer_bytes"] == pytest.approx(resident, rel=0.02)


@pytest.mark.parametrize(("strategy", "precision"), MIDDLE)
def test_a_middle_micro_batch_keeps_whole_gradients_where_they_wait(
    strategy: str, precision: str, bench: ModuleType
) -> None:
    def peak(accumulation: int) -> int:
        case = bench.Case(
            model="gpt2-tabled",
            config=TABLED,
            strategy=strategy,
            world_size=2,
            micro_batch=1,
            length=32,
            accumulation=accumulation,
            precision=precision,
        )
        request, configuration = bench.question(case, "cpu")
        return int(estimate(request, replace(configuration, backend="native")).memory.peak_allocated_bytes)

    assert peak(3) == pytest.approx(MIDDLE[strategy, precision], rel=0.01)
    if (strategy, precision) in ONCE:
        assert peak(1) == pytest.approx(ONCE[strategy, precision], rel=0.01)
    else:
        assert peak(3) > peak(1)


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


@pytest.mark.parametrize("strategy", WITHOUT_BLOCKS)
def test_a_gradient_is_beside_the_bucket_that_takes_it_in_a_model_without_blocks(
    strategy: Strategy,
) -> None:
    model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 2))
    work = WorkOptions(seq_len=1, global_batch=32, precision="fp32")
    request = make_request(facts_from_module(model), measured_cluster("cpu", 2), work, zero_backend="native")
    chosen = replace(configuration_for(strategy, 2), micro_batch_size=16, global_batch_size=32)
    assert estimate(request, chosen).memory.peak_allocated_bytes == pytest.approx(WITHOUT_BLOCKS[strategy], rel=0.04)


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
