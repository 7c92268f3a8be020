"""Compositions that the planner calls runnable train as one process does; `scripts.measure.parity` trains all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner import vocabulary as words
from planner.cost.combinations import why_refused
from planner.errors import ContradictoryRequest
from planner.search.estimate import why_impossible
from planner.types.plan import Configuration
from scripts.measure import parity
from scripts.measure.parity import (
    GLOBAL_BATCH,
    LENGTH,
    MODELS,
    OPTIONS,
    PRECISIONS,
    ParityRun,
    Right,
    Rows,
    Trained,
    code_digest,
    compared,
    compositions,
    measure,
    page,
    plans_of,
    question,
    row_of,
    with_options,
)
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Kind

_Layout = tuple[object, ...]


def _runnable(model: str, ranks: int) -> Iterator[Configuration]:
    """Whatever is made of strategies and degrees, asked of the planner's table one by one."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp, ep, strategy, schedule, splits_sequence, is_each in product(
        *(sizes,) * 4, words.STRATEGIES, words.SCHEDULES, (False, True), (False, True)
    ):
        if ranks % (tp * pp * cp) or (not is_each and strategy not in words.FSDP_STRATEGIES):
            continue
        data = ranks // (tp * pp * cp)
        replicas = {"ddp": data, "hsdp": 2}.get(strategy, 1)
        if data % replicas or (strategy == "hsdp" and ranks == 2):
            continue
        for backend, policy in product(words.backends_of(strategy), words.CHECKPOINTINGS):
            micro_batches = 2 * pp
            try:
                chosen = Configuration(
                    strategy=strategy,
                    backend=backend,
                    dp_replicate=replicas,
                    dp_shard=data // replicas,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    pp_schedule=schedule,
                    virtual_stages=2 if schedule == "interleaved" else 1,
                    sequence_parallel=splits_sequence,
                    micro_batch_size=GLOBAL_BATCH // (data * micro_batches),
                    gradient_accumulation_steps=micro_batches,
                    global_batch_size=GLOBAL_BATCH,
                    sequence_length=LENGTH,
                    precision="fp32",
                    optimizer="sgd",
                    activation_checkpointing=policy,
                    sync_each_micro_batch=is_each,
                )
            except ContradictoryRequest:
                continue
            if not (why_impossible(question(model, ranks, "fp32", pp=pp), chosen) or why_refused(chosen)):
                yield chosen


def _kind(chosen: Configuration) -> _Layout:
    """A layout without what takes turns on every number of ranks: recomputation, and when FSDP reduces."""
    data = (chosen.strategy, chosen.backend, chosen.dp_replicate, chosen.dp_shard)
    degrees = (chosen.tp, chosen.pp, chosen.cp, chosen.ep)
    pipeline = (chosen.pp_schedule, chosen.virtual_stages)
    return (*data, *degrees, chosen.sequence_parallel, *pipeline, chosen.splits_model or chosen.sync_each_micro_batch)


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 2), ("mixtral", 4)])
@pytest.mark.sweep(every=2)
def test_nothing_that_the_planner_calls_runnable_is_left_out(model: str, ranks: int) -> None:
    trained = [plan.configuration for plan in compositions(model, ranks, "fp32", every=True)]
    assert len({_kind(chosen) for chosen in trained}) == len(trained)
    assert {_kind(chosen) for chosen in trained} == {_kind(chosen) for chosen in _runnable(model, ranks)}
    assert not [chosen for chosen in trained if why_refused(chosen)]


def test_every_degree_schedule_and_recomputation_has_its_turn() -> None:
    policies = defaultdict(set)
    chosen = [plan.configuration for model in MODELS for name in PRECISIONS for plan in compositions(model, 4, name)]
    for each in chosen:
        policies[each.strategy].add(each.activation_checkpointing)
    assert set(policies) == {*words.STRATEGIES} - {"single"}
    assert all(met == {*words.CHECKPOINTINGS} for met in policies.values())
    assert {name for each in chosen for name in words.DEGREES if getattr(each, name) > 1} == {*words.DEGREES}
    assert {each.pp_schedule for each in chosen if each.pp > 1} == {*words.SCHEDULES}
    assert {each.sequence_parallel for each in chosen if each.tp > 1 == each.ep} == {False, True}
    assert all(each.gradient_accumulation_steps > 1 for each in chosen)


@pytest.mark.slow
def test_on_many_ranks_each_split_of_each_strategy_is_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(model: str) -> list[_Layout]:
        plans = [plan for name in PRECISIONS for plan in compositions(model, 4, name)]
        return [_kind(replace(plan.configuration, **plain)) for plan in plans]

    plain: dict[str, Any] = {"pp_schedule": "1f1b", "virtual_stages": 1, "sequence_parallel": False}
    plain |= {"sync_each_micro_batch": True}
    everything = {*splits("mixtral")}
    monkeypatch.setattr(parity, "MANY_RANKS", 4)
    taken = [kind for model in MODELS for kind in splits(model)]
    assert {*taken} == everything
    assert len(taken) < 1.1 * len(everything)  # but for FSDP that reduces once a step, which is a layout of its own


@pytest.mark.slow
def test_each_option_meets_what_splits_the_model() -> None:
    runs = [row_of(model, plan) for model in MODELS for plan in with_options(model)]
    for option in OPTIONS:
        met = [run for run in runs if all(getattr(run, name) == value for name, value in option.items())]
        pipelined = option.get("offload") is None  # which no pipeline has
        assert {run.split for run in met} >= {"tp 2", *(("pp 2",) if pipelined else ())}, option
    assert all(run.option for run in runs)


# What is compared, and what is written.


def _row_and_right() -> tuple[ParityRun, Right]:
    plan = plans_of("gpt2", 2, "fp32")[0]
    parameters = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}
    right = Right(losses=[3.0, 2.0], norms=[1.0, 2.0], parameters=parameters, moved={"w": 1e-2, "b": 1e-4})
    return row_of("gpt2", plan), right


@pytest.mark.parametrize(
    ("losses", "norms", "apart", "outcome"),
    [
        ([3.0, 2.0], [1.0, 2.0], {"w": (1e-6, 1e-6), "b": (0.0, 0.0)}, "same"),
        ([3.0, 2.0 + 3e-5], [1.0, 2.0], {"w": (0.0, 0.0), "b": (0.0, 0.0)}, "differs"),
        ([3.0, 2.0], [1.0, float("nan")], {"w": (0.0, 0.0), "b": (0.0, 0.0)}, "differs"),
        ([3.0, float("nan")], [1.0, 2.0], {"w": (0.0, 0.0), "b": (0.0, 0.0)}, "differs"),
        ([3.0, 2.0], [1.0, 2.0], {"w": (3e-5, 3e-5), "b": (0.0, 0.0)}, "differs"),
        ([3.0, 2.0], [1.0, 2.0], {"w": (0.0, 0.0), "b": (5e-6, 5e-6)}, "differs"),
        ([3.0, 2.0], [1.0, 2.0], {"w": (0.0, 0.0)}, "failed"),
    ],
    ids=["within", "loss", "norm-nan", "loss-nan", "parameter", "small-parameter", "missing"],
)
def test_what_is_the_same(
    losses: list[float], norms: list[float], apart: dict[str, tuple[float, float]], outcome: str
) -> None:
    row, right = _row_and_right()
    good = Trained(losses=right.losses, norms=right.norms, apart=dict.fromkeys(right.parameters, (0.0, 0.0)))
    trained = Trained(losses=losses, norms=norms, apart=apart)
    ranks = [trained] if outcome == "failed" else [good, trained]
    assert compared(row, right, ranks).outcome == outcome


def test_rows_are_resumed_by_the_same_code_and_left_out_where_nothing_trains_them(tmp_path: Path) -> None:
    first, second, third = (row_of("gpt2", plan) for plan in plans_of("gpt2", 2, "fp32")[:3])
    rows = Rows(tmp_path / "rows.csv")
    rows.add(replace(first, outcome="same", code=code_digest()))
    rows.add(replace(second, outcome="differs", code=code_digest()))
    rows.add(replace(third, outcome="same", code="of another"))
    rows.write()
    again = Rows(tmp_path / "rows.csv")
    assert {row.key for row in again} == {first.key, second.key, third.key}
    assert [again.is_done(row) for row in (first, second, third)] == [True, False, False]
    assert [again.is_done(row, by_any_code=True) for row in (first, second, third)] == [True, False, True]
    again.drop("gpt2", 2, "bf16", [])
    assert len(list(again)) == 3
    again.drop("gpt2", 2, "fp32", [first, second])
    assert {row.key for row in again} == {first.key, second.key}


def test_the_page_counts_what_is_the_same_and_says_what_is_not() -> None:
    rows = [replace(row_of("llama", plan), outcome="same", date="2026-01-02") for plan in plans_of("llama", 2, "fp32")]
    rows[0] = replace(rows[0], outcome="failed", where="Refused: no | such thing")
    written = page(rows)
    assert f"**{len(rows) - 1} of {len(rows)} are the same**, on 2 gloo ranks" in written
    assert "2026-01-02" in written
    assert f"| llama | 2 | {rows[0].name} | failed: Refused: no \\| such thing |" in written
    assert "## What is not the same" not in page(rows[1:])
    assert "not trained yet" not in written
    assert " 7 more were not trained yet, which `--missing` does." in page(rows, left=7)


# Real ranks.


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "composition",
    [
        Composition(tp=2, sequence_parallel=True, steps=2),
        Composition(pp=2, accumulation=2, steps=2),
        Composition(cp=2, steps=2, strategy="fsdp"),
    ],
)
@pytest.mark.sweep(every=3, suite=lambda kind, composition: (kind == "qwen3") == (composition.pp == 2))
def test_a_loss_without_logits_goes_with_every_split(ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in ranks.run(parallel_bodies.train, kind, composition, None, {"linear_cross_entropy": "chunked"}):
        assert max(difference.loss, difference.parameter) < 1e-5, difference


@pytest.mark.slow
@pytest.mark.parametrize("only", ["fsdp tp 2", "zero1 (native) tp 2,", "ddp pp 2, 1f1b", "fsdp cp 2"])
def test_compositions_of_two_ranks_train_as_one_process(only: str) -> None:
    wanted = [("llama", 2, plan) for plan in plans_of("llama", 2, "fp32") if only in row_of("llama", plan).name]
    assert wanted
    runs = list(measure(wanted, Console(quiet=True)))
    assert [(run.name, run.outcome) for run in runs] == [(run.name, "same") for run in runs]


FP16 = Composition(strategy="ddp", precision="fp16", accumulation=2, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(FP16, tp=2, pp=2),
        replace(FP16, strategy="fsdp", dp_shard=2, pp=2),
        replace(FP16, strategy="fsdp", tp=2, cp=2, sequence_parallel=True),
        replace(FP16, strategy="zero2", dp_shard=2, tp=2),
        replace(FP16, strategy="zero1", dp_shard=2, pp=2),
        replace(FP16, cp=2, pp=2),
    ],
    ids=lambda composition: f"{composition.strategy}-tp{composition.tp}-pp{composition.pp}-cp{composition.cp}",
)
def test_what_overflows_on_one_rank_is_skipped_by_all(four_ranks: RankPool, composition: Composition) -> None:
    first, *others = four_ranks.run(parallel_bodies.skips_together, composition)
    assert first.skipped == [0, 1, 1]
    assert first.scales == [256.0, 128.0, 128.0]
    assert first.norms[1] is None
    assert None not in (first.norms[0], first.norms[2])
    assert first.moved[1] == 0
    assert first.moved[0] > 1e-4 < first.moved[2]
    assert all(other == first for other in others)
