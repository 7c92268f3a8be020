"""The load phase against models that the engine places on two real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.probe import probe_hardware
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.cost.memory.load import load_ledger
from planner.cost.memory.states import states_of
from planner.cost.precision import recipe_of
from planner.models.catalogue import find_model
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import estimate, price
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.types.plan_io import save_plan
from planner.vocabulary import ZERO_STAGES, Precision, Strategy
from scripts.measure.gloo import quiet
from strategies.backends.deepspeed.engine import why_impossible
from tests.planner.cost.memory import load_bodies

RANKS = 2


@pytest.fixture(scope="module")
def pool(new_pool: Callable[..., RankPool]) -> Iterator[RankPool]:
    variables = {"DS_ACCELERATOR": "cpu", "DSPLAN_QUIET": "1"}
    with new_pool(RANKS, timeout_seconds=300, variables=variables) as ranks:
        yield quiet(ranks)


def ask(precision: Precision, ranks: int = RANKS) -> Request:
    facts = facts_from_config(load_bodies.CONFIG, "small-llama")
    cluster = probed_cluster(probe_hardware(), ranks=ranks)
    return make_request(facts, cluster, WorkOptions(seq_len=64, global_batch=ranks, precision=precision))


CASES: list[tuple[Strategy, Precision]] = [
    ("ddp", "fp32"),
    ("ddp", "bf16-pure"),
    ("fsdp", "bf16"),
    ("zero1", "fp32"),
    ("zero2", "bf16"),
    ("zero3", "fp32"),
    ("zero3", "bf16"),
]
IN_SUITE = (("ddp", "fp32"), ("fsdp", "bf16"), ("zero2", "bf16"), ("zero3", "fp32"))


@pytest.mark.parametrize(("strategy", "precision"), CASES)
@pytest.mark.sweep(every=4, suite=lambda strategy, precision: (strategy, precision) in IN_SUITE)
def test_the_peak_while_a_model_is_placed(
    strategy: Strategy, precision: Precision, pool: RankPool, tmp_path: Path
) -> None:
    if strategy in ZERO_STAGES and (problem := pool.run(why_impossible, precision)[0]):
        pytest.skip(problem)
    request, configuration = exact(ask(precision), ExactOptions(strategy=strategy))
    plan = tmp_path / "plan.yaml"
    save_plan(estimate(request, configuration), plan)
    # Gloo's threads free what ZeRO-3 gathers, and the profiler does not see threads that were there before it.
    body = load_bodies.peak_of_storages if strategy == "zero3" else load_bodies.peak_of_allocations
    job = price(request, configuration).job
    recipe = recipe_of(job)
    predicted = load_ledger(job, recipe, states_of(job, recipe)).total
    assert predicted == pytest.approx(_peak(pool, body, str(plan)), rel=0.02)


def _peak(pool: RankPool, body: Callable[[str], int], plan: str) -> int:
    """The peak of the rank that has most, of three times the least: where one of gloo's threads is the last to hold
    what a broadcast has gathered, the profiler misses that it is freed."""
    times = [pool.run(body, plan) for _ in range(3)]
    return max(map(min, zip(*times, strict=True)))


def test_what_a_gpu_holds_while_the_shards_of_a_large_model_are_made() -> None:
    """No strategy that shards the weights puts the whole model on a device; ZeRO-1 does."""
    whole = 70.55e9
    largest = {}
    strategies: tuple[Strategy, ...] = ("zero1", "fsdp", "zero3")
    for strategy in strategies:
        cluster = resolve_cluster(HardwareRequest(gpu="h100", gpus=64))
        asked_for = make_request(find_model("llama-3-70b"), cluster, WorkOptions(precision="bf16"))
        request, configuration = exact(asked_for, ExactOptions(strategy=strategy))
        largest[strategy] = price(request, configuration).memory.phases["load"]
    assert largest["zero1"] >= 2 * whole
    assert largest["fsdp"] < 4 * whole / 64 + 4 * (2 * 128256 * 8192 + 8192) * 1.02
    assert largest["zero3"] < 16 * whole / 64 + 2 * 128256 * 8192


def test_on_a_cpu_the_model_that_is_placed_is_there_already() -> None:
    request, configuration = exact(ask("bf16", ranks=1), ExactOptions(strategy="single"))
    memory = price(request, configuration).memory
    assert memory.phases["load"] >= 4 * request.counts.total
    assert memory.host_load_bytes_per_node == 0
