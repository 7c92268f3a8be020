"""A benchmark's choice of what to measure, and the file that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dsplan.diagnostics.bench.plan import (
    BenchPlan,
    Wanted,
    default_ranks,
    load_bench_plan,
    make_bench_plan,
    parse_ranks,
    save_bench_plan,
)
from hardware_db.errors import DsplanError
from hardware_db.microbench.grid import KINDS, quick_points
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.models.resolve import resolve_model
from planner.types.cluster import Cluster
from strategies.engine.registry import STRATEGIES
from tests.dsplan.diagnostics.bench.samples import LAPTOP


@pytest.fixture(scope="module")
def host() -> Cluster:
    return probed_cluster(LAPTOP)


@pytest.fixture(scope="module")
def eight() -> Cluster:
    return resolve_cluster(HardwareRequest(gpu="A100-SXM4-80GB", gpus=8))


def test_ranks_are_numbers_in_order() -> None:
    assert parse_ranks("4, 2,2") == (2, 4)


@pytest.mark.parametrize("text", ["", "two", "0", "2,", "-1", "1025"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(DsplanError, match=r"--ranks .* is not a number of processes"):
        parse_ranks(text)


def test_without_a_number_the_ranks_are_those_that_run_starts(host: Cluster, eight: Cluster) -> None:
    assert default_ranks(host) == (2,)
    assert default_ranks(eight) == (1, 2, 4, 8)
    assert default_ranks(resolve_cluster(HardwareRequest(gpu="A100-SXM4-80GB", gpus=6))) == (1, 2, 4, 6)


def test_a_kind_that_is_none_is_named_with_the_nearest() -> None:
    with pytest.raises(DsplanError, match="'matmuls'; nearest: matmul"):
        Wanted(ranks=(2,), kinds=("matmuls",))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "host-link"])
def test_only_one_kind_is_measured(kind: str, host: Cluster) -> None:
    plan = make_bench_plan(Wanted(ranks=(2,), kinds=(kind,)), host)
    assert {point.operation for point in plan.points} == set(KINDS[kind])
    assert not plan.training


def test_what_leaves_nothing_is_refused(host: Cluster) -> None:
    with pytest.raises(DsplanError, match="--only host-link leaves nothing"):
        make_bench_plan(Wanted(ranks=(2,), kinds=("host-link",)), host)
    with pytest.raises(DsplanError, match="--only training leaves nothing"):
        make_bench_plan(Wanted(ranks=(2,), kinds=("training",), quick=True), host)


def test_quick_is_what_a_training_script_measures(host: Cluster) -> None:
    from hardware_db.microbench.grid import CPU

    plan = make_bench_plan(Wanted(ranks=(2, 4), quick=True), host)
    assert plan.points == (*quick_points(CPU, 2), *quick_points(CPU, 4))
    assert not plan.training


def test_every_strategy_that_several_ranks_can_run_is_trained(host: Cluster) -> None:
    plan = make_bench_plan(Wanted(ranks=(1, 2), kinds=("training",)), host)
    alone = {case.configuration.strategy for case in plan.training if case.ranks == 1}
    several = {case.configuration.strategy for case in plan.training if case.ranks == 2}
    assert (alone, several) == ({"single"}, {"ddp", "fsdp", "zero1", "zero2", "zero3"})
    assert several < set(STRATEGIES)
    without = make_bench_plan(Wanted(ranks=(2,), kinds=("training",), deepspeed=False), host)
    assert {case.configuration.strategy for case in without.training} == several
    assert {case.configuration.backend for case in without.training} == {"torch", "native"}


def test_one_gpu_also_trades_time_for_memory(eight: Cluster) -> None:
    plan = make_bench_plan(Wanted(ranks=(1,), kinds=("training",)), eight)
    chosen = {case.configuration for case in plan.training}
    assert {configuration.offload for configuration in chosen} == {"none", "optimizer", "all"}
    assert {configuration.activation_checkpointing for configuration in chosen} == {"none", "full"}
    assert {configuration.precision for configuration in chosen} == {"bf16"}


def test_ranks_with_processes_of_their_own_follow_each_other(host: Cluster) -> None:
    """DeepSpeed and every number of ranks need a new pool, which takes seconds."""
    plan = make_bench_plan(Wanted(ranks=(2, 4)), host)
    kinds = [(case.ranks, case.needs_deepspeed) for case in plan.training]
    assert kinds == sorted(kinds)
    ranks = [point.ranks for point in plan.points]
    assert ranks == sorted(ranks)


def test_a_model_brings_the_shapes_of_its_layers_and_is_trained(host: Cluster) -> None:
    plan = make_bench_plan(Wanted(ranks=(2,), model=resolve_model("gpt2")), host)
    shapes = {point.shape for point in plan.points if point.operation == "matmul"}
    assert {(256, 768, 768), (256, 768, 3072), (1024, 3072, 768)} <= shapes
    assert {point.shape for point in plan.points if point.operation == "attention"} == {
        (1, 12, 256, 64),
        (4, 12, 256, 64),
    }
    assert {case.model for case in plan.training} == {resolve_model("gpt2").name}


def test_only_what_fits_is_trained(eight: Cluster) -> None:
    plan = make_bench_plan(Wanted(ranks=(8,), kinds=("training",), model=resolve_model("llama-2-13b")), eight)
    strategies = {case.configuration.strategy for case in plan.training}
    assert "ddp" not in strategies
    assert {"fsdp", "zero3"} <= strategies


def test_what_a_gpu_does_alone_is_measured_with_all_at_work(eight: Cluster) -> None:
    plan = make_bench_plan(Wanted(ranks=(1, 2, 8)), eight)
    assert {point.ranks for point in plan.points if point.operation == "attention"} == {8}
    assert {point.ranks for point in plan.points if point.operation == "all_gather"} == {2, 8}
    assert {point.ranks for point in plan.points if point.operation == "matmul"} == {1, 2, 8}


def test_more_ranks_than_gpus_are_refused(eight: Cluster) -> None:
    with pytest.raises(DsplanError, match="--ranks 16 needs as many GPUs in one node and there are 8; use 8 or fewer"):
        make_bench_plan(Wanted(ranks=(2, 16)), eight)


@pytest.mark.parametrize("name", [None, "gpt2"])
@pytest.mark.sweep(every=2)
def test_a_plan_comes_back_from_its_file(name: str | None, host: Cluster, eight: Cluster, tmp_path: Path) -> None:
    for cluster in (host, eight):
        model = None if name is None else resolve_model(name)
        plan = make_bench_plan(Wanted(ranks=default_ranks(cluster), model=model), cluster)
        save_bench_plan(plan, tmp_path / "bench.yaml")
        assert load_bench_plan(tmp_path / "bench.yaml") == plan


GOOD = {
    "schema_version": 1,
    "device": "cpu",
    "points": [{"operation": "matmul", "dtype": "fp32", "shape": [8, 8, 8], "ranks": 2}],
}


def broken(**changes: object) -> str:
    return yaml.safe_dump({**GOOD, **changes})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a benchmark plan"),
        ("a: 1\nb: [", "is not YAML at line 2"),
        (broken(schema_version=2), "has schema_version 2, this dsplan reads 1"),
        (broken(device=None), "device: is missing"),
        (broken(pionts=[]), "has an unknown key 'pionts'"),
        (broken(points=5), "points: is not a list of mappings"),
        (broken(points=[{"dtype": "fp32"}]), "points, item 1: operation is missing"),
        (broken(points=[{"operation": "magic"}]), "names no operation: 'magic'; use one of matmul"),
        (broken(points=[{"operation": "matmul", "shape": [8, 0]}]), "has shape \\[8, 0\\]"),
        (broken(points=[{"operation": "matmul", "shape": 8}]), "shape is 8; it must be a list"),
        (broken(points=[{"operation": "matmul", "dtype": "fp32", "shape": [8, 8]}]), "needs a shape of 3 extents"),
        (broken(points=[{"operation": "memory"}]), "needs a size"),
        (broken(points=[{"operation": "all_reduce", "size": 8, "ranks": 2}]), "needs a dtype: fp32, bf16, fp16"),
        (broken(points=[{"operation": "all_reduce", "size": 8, "dtype": "fp32"}]), "needs at least 2 ranks"),
        (broken(points=[{"operation": "memory", "size": "big"}]), "size is 'big'; it must be a whole number"),
        (broken(points=[{"operation": "memory", "size": 8, "ranks": 0}]), "has ranks 0"),
        (
            broken(points=[{"operation": "matmul", "speed": 1}]),
            "speed is not a key; the keys are op",
        ),
        (broken(training=[{"model": "gpt2", "task": "chess"}]), "task 'chess' is not one of causal-lm, "),
        (broken(training=[{"model": "gpt2", "task": "causal-lm"}]), "item 1: plan is missing"),
        (
            broken(training=[{"model": "gpt2", "task": "causal-lm", "plan": {"strategy": "ddp"}}]),
            "backend is missing",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_reported_in_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(text)
    with pytest.raises(DsplanError, match=complaint) as caught:
        load_bench_plan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DsplanError, match="cannot be read"):
        load_bench_plan(tmp_path / "none.yaml")


def test_a_plan_knows_its_most_ranks(host: Cluster) -> None:
    assert make_bench_plan(Wanted(ranks=(2, 4)), host).most_ranks == 4
    assert BenchPlan(device="cpu").most_ranks == 1
