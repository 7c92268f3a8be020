"""Layers split over tensor-parallel ranks train as one process does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import FirstRank
from strategies.tracing.step.checkpointing import checkpoint_activations
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Difference, Kind

TP = Composition(strategy="ddp", tp=2)
FSDP = Composition(strategy="fsdp", dp_shard=2, tp=2)


def _worst(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda difference: max(difference.loss, difference.parameter))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral", "gpt", "numbered"])
@pytest.mark.sweep(every=4)
def test_two_ranks_train_as_one_process(ranks: RankPool, kind: Kind) -> None:
    worst = _worst(ranks.run(parallel_bodies.train, kind, replace(TP, clipping=0.5)))
    assert max(worst.loss, worst.parameter, worst.norm) < 1e-5, worst
    assert worst.share < 0.7


@pytest.mark.parametrize("split", [TP, replace(TP, strategy="fsdp", sequence_parallel=True)])
def test_layers_of_a_script_are_split_by_the_plan(ranks: RankPool, split: Composition) -> None:
    worst = _worst(ranks.run(parallel_bodies.train, "layers", split))
    assert max(worst.loss, worst.parameter) < 1e-5, worst
    assert worst.share < 0.55


@pytest.mark.parametrize(("strategy", "parts"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard"), ("zero2", "dp_shard")])
def test_layers_split_over_ranks_with_different_samples_are_refused(ranks: RankPool, strategy: str, parts: str) -> None:
    for message in ranks.run(parallel_bodies.refused_layers, Composition(strategy=strategy, **{parts: 2}), None):
        assert message.startswith(
            "tokens is split over 2 ranks and the plan has tp 1; use tp 2, or make the layer before"
        )


def test_layers_split_over_other_ranks_than_the_plans_are_refused(four_ranks: RankPool) -> None:
    messages = four_ranks.run(parallel_bodies.refused_layers, FSDP, ((0, 2), (1, 3)))
    assert messages[3].startswith("tokens is split over ranks 1, 3 and the plan's tp ranks are 2, 3, who read the same")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.sweep(every=2, suite=lambda kind, strategy: (kind, strategy) in (("llama", "fsdp"), ("mixtral", "ddp")))
def test_split_sequences_train_as_one_process(ranks: RankPool, kind: Kind, strategy: str) -> None:
    split = replace(TP, strategy=strategy, sequence_parallel=True, accumulation=2, checkpointing="full", clipping=0.5)
    worst = _worst(ranks.run(parallel_bodies.train, kind, split))
    assert max(worst.loss, worst.parameter, worst.norm) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        FSDP,
        replace(FSDP, sequence_parallel=True, checkpointing="full"),
        replace(FSDP, checkpointing="selective", clipping=0.5, accumulation=2),
        replace(FSDP, strategy="ddp", dp_shard=1, dp_replicate=2),
        replace(FSDP, dp_shard=1, tp=4),
        replace(FSDP, precision="bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_four_ranks_train_as_one_process(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    if composition.sequence_parallel and kind in ("gpt2", "gpt"):
        pytest.skip(f"{kind} has no tensor-parallel plan that says where it gathers tokens")
    worst = _worst(four_ranks.run(parallel_bodies.train, kind, composition))
    assert max(worst.loss, worst.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), worst


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            {"blocks.*.up": "colwise"},
            "weights of blocks.0 and 1 like it and gathers what they compute, which is slower: give the layer that"
            ' takes what up makes the style "rowwise" in tp_plan=',
        ),
        (
            {},
            "weights of blocks.0.attention and 1 like it and gathers what they compute, which is slower: if it is"
            " attention, name the attribute with its number of heads num_heads, to split by heads",
        ),
    ],
)
def test_gathered_layers_say_what_to_do(ranks: RankPool, plan: dict[str, str], sentence: str) -> None:
    notices = ranks.run(parallel_bodies.said_of_splits, TP, plan)[0]
    assert notices == [f"tensor parallelism splits {sentence}"]


@pytest.fixture
def eight_imagined() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_imagined")
def test_ranks_that_shard_samples_and_states_make_no_warning() -> None:
    there = FirstRank(world_size=8)
    for replicas, expected in ((1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [[0, 1, 2, 3], [4, 5, 6, 7]])):
        plan = Composition(strategy="hsdp", dp_replicate=replicas, dp_shard=4 // replicas, cp=2).plan()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mesh = Mesh.of(plan.configuration, there).shard_mesh
        assert mesh.mesh.tolist() == expected


def test_transformers_recomputes_without_a_warning() -> None:
    model = parallel_bodies.build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_activations(model, "full")
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
