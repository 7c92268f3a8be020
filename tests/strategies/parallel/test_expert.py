"""Experts that ranks share train as one process does."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.parallel.expert import is_mixture
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Kind

EP = Composition(strategy="fsdp", dp_shard=2, ep=2)


@pytest.mark.parametrize(
    ("kind", "composition"),
    [
        ("mixtral", replace(EP, clipping=0.5, checkpointing="full", accumulation=2)),
        ("mixtral", replace(EP, strategy="zero1", clipping=0.5)),
        ("mixtral", replace(EP, strategy="ddp", dp_shard=1, cp=2)),
        ("deepseek", replace(EP, checkpointing="selective", steps=2)),
    ],
)
@pytest.mark.sweep(every=4)
def test_two_ranks_train_as_one_process(ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5, difference
        assert difference.share < 0.9


TENSOR = replace(EP, dp_shard=1, tp=2, sequence_parallel=True, steps=3)


@pytest.mark.parametrize(
    ("kind", "composition"),
    [
        ("mixtral", replace(TENSOR, clipping=0.5, checkpointing="full")),
        ("deepseek", replace(TENSOR, strategy="ddp")),
        ("qwen2_moe", replace(TENSOR, strategy="ddp")),
    ],
)
@pytest.mark.sweep(every=4)
def test_experts_lie_whole_on_ranks_that_split_layers(ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5, difference
        assert difference.share < 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(TENSOR, dp_shard=2, ep=4, clipping=0.5),
        replace(TENSOR, dp_replicate=2, strategy="hsdp", checkpointing="selective"),
        replace(TENSOR, dp_replicate=2, strategy="ddp"),
        replace(TENSOR, dp_shard=2, strategy="zero1", clipping=0.5),
        replace(TENSOR, dp_shard=2, strategy="zero2", ep=4),
        replace(TENSOR, pp=2, accumulation=2),
        replace(TENSOR, cp=2, ep=4, strategy="ddp"),
    ],
)
@pytest.mark.parametrize("kind", ["mixtral", "deepseek", "qwen2_moe"])
def test_four_ranks_split_layers_and_spread_experts(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in four_ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter) < 1e-5, difference


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(TENSOR, cp=2, pp=2, accumulation=2, ep=4, strategy="ddp"),
        replace(TENSOR, dp_shard=2, pp=2, accumulation=2, ep=4, strategy="zero1"),
        replace(TENSOR, dp_shard=2, cp=2, ep=4, precision="bf16"),
        replace(TENSOR, dp_shard=2, dp_replicate=2, ep=2, strategy="hsdp"),
    ],
)
def test_eight_ranks_train_as_one_process(eight_ranks: RankPool, composition: Composition) -> None:
    for difference in eight_ranks.run(parallel_bodies.train, "mixtral", composition):
        assert max(difference.loss, difference.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), (
            difference
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(EP, dp_shard=4, checkpointing="full"),
        replace(EP, strategy="hsdp", dp_replicate=2),
        replace(EP, cp=2, ep=4),
        replace(EP, pp=2, accumulation=2),
        replace(EP, dp_shard=4, strategy="zero2"),
        replace(EP, dp_shard=4, precision="bf16"),
    ],
)
def test_four_ranks_train_as_one_process(four_ranks: RankPool, composition: Composition) -> None:
    for difference in four_ranks.run(parallel_bodies.train, "mixtral", composition):
        assert max(difference.loss, difference.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), (
            difference
        )


def test_experts_that_are_given_no_choice_are_no_mixture() -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    with torch.device("meta"):
        sorted_already = transformers.models.llama4.modeling_llama4.Llama4TextExperts(config)
        mixture = transformers.models.mixtral.modeling_mixtral.MixtralExperts(
            transformers.MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
        )
    assert not is_mixture(sorted_already)
    assert is_mixture(mixture)
