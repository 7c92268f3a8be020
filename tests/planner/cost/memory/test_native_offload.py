"""Offload in plans of our own ZeRO: by arithmetic on GPUs, and on CPUs beside what two real ranks measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.timing import step_time
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import Priced, estimate, price, why_impossible
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan import Plan

PSI = 8_030_261_248  # Llama-3-8B
GPUS = 4
MEASURED: Mapping[tuple[str, str, float], tuple[int, int]] = {
    ("zero1", "fp32", 1.0): (56_100_000, 121_100_000),
    ("zero1", "fp32", 0.5): (83_400_000, 148_400_000),
    ("zero1", "bf16", 1.0): (28_100_000, 70_800_000),
    ("zero2", "bf16", 0.5): (69_100_000, 108_600_000),
    ("zero3", "fp32", 1.0): (28_200_000, 118_900_000),
    ("zero3", "bf16", 1.0): (14_100_000, 64_000_000),
    ("zero3", "bf16", 0.5): (50_500_000, 100_400_000),
}
"""Bytes of gpt2-14m on 2 CPU ranks, states on NVMe, between steps and at the peak: `measure_subject`, to 0.1 MB."""


def ask(gpu: str = "a100-80gb", gpus: int = GPUS, **more: Any) -> Request:
    cluster = resolve_cluster(HardwareRequest(gpu=gpu, gpus=gpus))
    work = WorkOptions(seq_len=2048, precision="bf16")
    return replace(make_request(find_model("llama-3-8b"), cluster, work), zero_backend="native", **more)


def priced(strategy: str, offload: str = "none", ratio: float = 1.0) -> Priced:
    options = ExactOptions(
        strategy=strategy,  # type: ignore[arg-type]
        backend="native",
        offload=offload,  # type: ignore[arg-type]
        offload_ratio=ratio,
    )
    return price(*exact(ask(), options))


def on_device(priced: Priced) -> int:
    return priced.memory.states["parameters_bytes"] + priced.memory.states["optimizer_bytes"]


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("offload", ["optimizer", "nvme"])
def test_masters_and_moments_leave_the_device(offload: str, ratio: float) -> None:
    """12 bytes a parameter of the rank's part; a share is met to half a bucket."""
    bucket = 12 * 128256 * 4096 / GPUS
    left = on_device(priced("zero2")) - on_device(priced("zero2", offload, ratio))
    assert left == pytest.approx(ratio * 12 * PSI / GPUS, abs=bucket if ratio < 1 else 1e6)


def test_in_stage_3_the_part_of_the_weights_leaves_too() -> None:
    """Without offload the sharded weights are the masters; with the optimizer away the device keeps 16 bits of them."""
    part = PSI / GPUS
    expected = {"none": 12 * part, "optimizer": 2 * part, "all": 0, "nvme": 0}
    for offload, size in expected.items():
        assert on_device(priced("zero3", offload)) == pytest.approx(size, rel=1e-3)


def test_what_leaves_is_in_host_memory_or_on_the_disk() -> None:
    part = PSI / GPUS
    host = {offload: priced("zero3", offload).memory.host_bytes_per_node / GPUS for offload in ("none", "all", "nvme")}
    assert 16 * part < host["all"] - host["none"] < 1.25 * 16 * part, "masters, moments, gradients, weights"
    assert 4 * part < host["nvme"] - host["none"] < 0.6 * (host["all"] - host["none"])


def test_a_node_without_a_disk_has_no_room() -> None:
    request, configuration = exact(ask(), ExactOptions(strategy="zero2", backend="native", offload="nvme"))
    assert request.cluster.nvme_bytes_per_node > 0
    bare = replace(request, cluster=replace(request.cluster, nvme_bytes_per_node=0))
    assert price(request, configuration).judgement.verdict == "fits"
    assert "no NVMe disk" in price(bare, configuration).judgement.reason


def test_the_slowest_of_what_runs_at_once_counts() -> None:
    times = {
        key: step_time(priced("zero2", *key).job) for key in (("none",), ("optimizer", 0.5), ("optimizer",), ("nvme",))
    }
    seconds = [time.step_seconds for time in times.values()]
    assert seconds == sorted(seconds)
    half, whole = times["optimizer", 0.5], times["optimizer",]
    assert half.optimizer_seconds == pytest.approx(whole.optimizer_seconds / 2, rel=0.01)
    states = 2 * 12 * PSI / 3e9
    assert times["nvme",].offload_seconds + times["nvme",].optimizer_seconds == pytest.approx(states, rel=0.05)


def test_the_search_offloads_no_more_than_it_must() -> None:
    best = recommend(ask("a100-80gb", 2)).plans[0].configuration
    assert best.offload == "optimizer"
    assert best.offload_ratio in (0.25, 0.5, 0.75)
    plans = recommend(ask("a100-40gb", 2, offload="nvme")).plans
    assert {plan.configuration.offload for plan in plans} == {"nvme"}
    (plan, *_) = recommend(ask("a100-40gb", 2, offload="optimizer", offload_ratio=0.9)).plans
    assert plan.configuration.offload_ratio == 0.9
    assert plan.runnable


def test_a_share_needs_something_to_share() -> None:
    for options in ({"backend": "deepspeed", "offload": "optimizer"}, {"backend": "native"}):
        request, configuration = exact(ask(), ExactOptions(strategy="zero2", offload_ratio=0.5, **options))  # type: ignore[arg-type]
        reason = str(why_impossible(request, configuration))
        assert "an offload ratio (0.5) is for backend native with an offload" in reason
    with pytest.raises(ContradictoryRequest, match="offload_ratio is 0"):
        exact(ask(), ExactOptions(strategy="zero2", offload_ratio=0.0))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.measure import zero_rows

    return zero_rows


def planned(bench: ModuleType, strategy: str, precision: str, ratio: float, offload: str = "nvme") -> Plan:
    """The plan of gpt2-14m on two CPU ranks."""
    from scripts.measure import memory_grid, memory_rows

    case = memory_grid.Case(
        model="gpt2-14m",
        config=bench.SIZES["gpt2-14m"],
        strategy=strategy,  # type: ignore[arg-type]
        world_size=2,
        micro_batch=1,
        length=128,
        precision=precision,  # type: ignore[arg-type]
    )
    request, configuration = memory_rows.question(case, "cpu")
    chosen = replace(configuration, backend="native", offload=offload, offload_ratio=ratio)
    return estimate(request, chosen)


@pytest.mark.parametrize(("strategy", "precision", "ratio"), MEASURED)
def test_bytes_on_cpus_are_as_measured(strategy: str, precision: str, ratio: float, bench: ModuleType) -> None:
    resident, peak = MEASURED[strategy, precision, ratio]
    memory = planned(bench, strategy, precision, ratio).memory
    assert memory.states["parameters_bytes"] + memory.states["optimizer_bytes"] == pytest.approx(resident, rel=0.05)
    assert memory.peak_allocated_bytes == pytest.approx(peak, rel=0.09)


def test_on_a_cpu_there_is_nothing_to_leave_but_for_a_disk(bench: ModuleType) -> None:
    stays, leaves = (planned(bench, "zero2", "fp32", 1.0, offload).memory for offload in ("none", "optimizer"))
    assert stays == leaves
