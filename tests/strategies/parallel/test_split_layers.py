"""Models that tensor-parallel ranks share train as in one process: losses and every parameter."""

from __future__ import annotations

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies import parallel_bodies
from tests.strategies import tensor_bodies as bodies
from tests.strategies.tensor_bodies import Composition, SplitRun

FP32 = 1e-5
"""Relative to the largest: sums in another order over ranks, five steps of AdamW."""
BF16 = 2e-2
MODELS = ("gpt2", "llama", "mixtral", "gpt")
SLOW = pytest.mark.slow


def check(runs: list[SplitRun], composition: Composition) -> None:
    """Compare what ranks saw with one process."""
    alone, bound = bodies.train_alone(composition), FP32 if composition.precision == "fp32" else BF16
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=bound)
        for name, expected in alone.parameters.items():
            assert run.parameters[name].shape == expected.shape
            assert float((run.parameters[name] - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sweep(every=4, suite=lambda model, sequence_parallel: sequence_parallel == (model in ("llama", "gpt2")))
def test_two_ranks_share_a_model(ranks: RankPool, model: str, sequence_parallel: bool) -> None:
    composition = Composition(model=model, sequence_parallel=sequence_parallel)
    runs = ranks.run(bodies.train_split, composition)
    check(runs, composition)
    whole = sum(parameter.numel() for parameter in bodies.model_named(model).parameters())
    assert all(run.held < 0.56 * whole for run in runs)


@pytest.mark.parametrize(
    "composition",
    [
        Composition(model="llama", dp=2, clipping=0.1, checkpointing="full", sequence_parallel=True),
        Composition(model="gpt2", strategy="ddp", dp=2, accumulation=2, clipping=0.1),
        Composition(model="llama", tp=4, sequence_parallel=True, clipping=0.1),
        Composition(model="mixtral", strategy="hsdp", dp=2, dp_replicate=2, checkpointing="selective"),
        Composition(model="llama", strategy="fsdp-grad-op", dp=2, precision="bf16"),
        *(
            pytest.param(Composition(model=model, tp=4, sequence_parallel=sequence), marks=SLOW)
            for model in (*MODELS, "qwen3", "neox", "deepseek")
            for sequence in (False, True)
        ),
        *(
            pytest.param(Composition(model=model, strategy=strategy, dp=2, precision=precision), marks=SLOW)
            for model in MODELS
            for strategy in ("ddp", "fsdp")
            for precision in ("fp32", "bf16")
        ),
    ],
    ids=str,
)
@pytest.mark.sweep(every=4)
def test_four_ranks_share_a_model_and_its_samples(four_ranks: RankPool, composition: Composition) -> None:
    runs = four_ranks.run(bodies.train_split, composition)
    check(runs, composition)
    if composition.clipping:
        alone = bodies.norm_alone(composition)
        assert [run.norm for run in runs] == pytest.approx([alone] * 4, rel=1e-4)


def test_a_plan_of_the_script_is_followed(ranks: RankPool) -> None:
    plan = (("blocks.*.up", "colwise"), ("blocks.*.down", "rowwise"))
    composition = Composition(model="gpt", tp_plan=plan, steps=2)
    runs = ranks.run(bodies.train_split, composition)
    check(runs, composition)
    whole = sum(parameter.numel() for parameter in bodies.model_named("gpt").parameters())
    split = sum(
        p.numel() for name, p in bodies.model_named("gpt").named_parameters() if ".up." in name or "down.w" in name
    )
    assert {run.held for run in runs} == {whole - split // 2}


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"blocks.*.up": "sideways"}, "tp_plan has style 'sideways' for blocks.*.up, which is not known"),
        ({"layers.*.up": "colwise"}, "tp_plan: 'layers.*.up' fits no module or parameter of Gpt"),
    ],
)
def test_plans_that_cannot_be_followed_say_so(ranks: RankPool, plan: dict[str, str], sentence: str) -> None:
    composition = Composition(model="gpt", tp_plan=tuple(plan.items()))
    for message in ranks.run(bodies.refusal_of, composition):
        assert sentence in message


def test_lengths_that_do_not_divide_are_refused_by_sequence_parallelism(ranks: RankPool) -> None:
    for message in ranks.run(bodies.refusal_of_odd_length):
        assert "splits the length of activations [2, 7, 16] over 2 ranks, which does not divide" in message


def test_inside_whole_parameters_a_rank_computes_alone(ranks: RankPool) -> None:
    before, inside, larger = zip(*ranks.run(bodies.loss_inside_whole_parameters), strict=True)
    assert inside == pytest.approx(before, rel=1e-5)
    assert larger == pytest.approx((30, 30), rel=1e-4), "what rank 0 wrote to the head is taken over"


def test_what_ranks_split_is_dropped_out_differently_and_what_they_share_alike(ranks: RankPool) -> None:
    of_ranks = ranks.run(bodies.dropped_out)
    assert of_ranks[0]["shared"] == of_ranks[1]["shared"]
    assert of_ranks[0]["own"] != of_ranks[1]["own"]
    assert of_ranks[0]["again"] != of_ranks[0]["own"]


def test_ranks_that_share_samples_count_their_share(ranks: RankPool) -> None:
    assert [row["tokens"] for row in ranks.run(bodies.metrics_row)] == [bodies.SAMPLES * bodies.LENGTH // 2] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.slow
def test_adapters_are_split_with_their_layers(ranks: RankPool, sequence_parallel: bool) -> None:
    for differences in ranks.run(bodies.adapters_trained, sequence_parallel):
        assert max(differences["loss"], differences["weights"]) < 1e-5
        assert differences["split adapters"] == 2 * 5, "A of row layers, B of column layers, in two blocks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_stages_of_a_pipeline_are_split_with_their_tied_embeddings(
    four_ranks: RankPool, kind: parallel_bodies.Kind
) -> None:
    staged = parallel_bodies.Composition(strategy="ddp", tp=2, pp=2, accumulation=4, sequence_parallel=True)
    for difference in four_ranks.run(parallel_bodies.train, kind, staged):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5
