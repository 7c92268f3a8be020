"""Layers that ranks share compute what the same layers whole compute, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies import tensor_bodies as bodies


def test_column_and_row_layers_are_linear_layers(ranks: RankPool) -> None:
    for differences in ranks.run(bodies.linear_layers):
        assert max(differences.values()) < 1e-4, differences


def test_split_attention_and_mlp_are_those_of_one_rank(ranks: RankPool) -> None:
    for differences in ranks.run(bodies.blocks):
        assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize("length", [10, 11])
def test_a_vocabulary_of_any_length_is_split_over_three_ranks(three_ranks: RankPool, length: int) -> None:
    for differences in three_ranks.run(bodies.vocabulary, length):
        assert max(differences.values()) < 1e-5, differences


def test_parts_of_a_sequence_come_together_and_apart(three_ranks: RankPool) -> None:
    for differences in three_ranks.run(bodies.sequence_parts):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("tokens", [False, True])
def test_the_naive_split_lays_layers_on_ranks(three_ranks: RankPool, tokens: bool) -> None:
    of_ranks = three_ranks.run(bodies.layers_on_ranks_of, tokens)
    assert [names for _, names in of_ranks] == [["0", "1"], ["2"], ["3"]]
    assert max(worst for worst, _ in of_ranks) < 1e-5


def test_layers_of_one_process_are_plain_ones() -> None:
    torch.manual_seed(0)
    column = dsplan.parallel.ColumnParallelLinear(4, 6)
    torch.manual_seed(0)
    whole, x = nn.Linear(4, 6), torch.ones(2, 4)
    assert torch.equal(column(x), whole(x))


def test_a_width_that_does_not_divide_says_so(ranks: RankPool) -> None:
    assert (
        ranks.run(bodies.refusal_of_odd_width)
        == ["ColumnParallelLinear: 5 does not divide over 2 ranks; use a tp that divides it"] * 2
    )


def test_a_loss_over_ranks_with_other_targets_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(bodies.refusal_of_other_targets):
        assert "the 2 ranks of the job read different targets; give group=" in message
