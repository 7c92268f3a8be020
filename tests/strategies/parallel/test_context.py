"""Sequences that ranks share train as one process does."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention.bias import CausalBias
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.parallel import context
from strategies.parallel.context import earlier_tokens
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import Composition, Kind, Unfit

CP = Composition(strategy="fsdp", cp=2)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
@pytest.mark.sweep(
    every=2, suite=lambda kind: kind in ("llama", "mixtral")
)  # the others are in the stages of a pipeline below
def test_two_ranks_train_as_one_process(ranks: RankPool, kind: Kind) -> None:
    composition = replace(CP, clipping=0.5, checkpointing="full", accumulation=2)
    for difference in ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5, difference


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("checkpointing", "is_chosen_by_script", "passes"),
    [("none", False, 1), ("full", False, 2), ("selective", False, 2), ("none", True, 2)],
)
@pytest.mark.sweep(
    every=2,
    suite=lambda strategy, checkpointing, is_chosen_by_script: (
        (strategy == "fsdp") == (checkpointing == "full" or is_chosen_by_script)
    ),
)
def test_attention_over_all_tokens_is_computed_again(
    ranks: RankPool, strategy: str, checkpointing: str, is_chosen_by_script: bool, passes: int
) -> None:
    composition = replace(CP, strategy=strategy, checkpointing=checkpointing)
    for difference, seen in ranks.run(parallel_bodies.passes_of_a_block, "llama", composition, is_chosen_by_script):
        assert difference < 1e-5
        assert seen == passes


def test_what_a_gpus_attention_skips_can_be_said_where_products_are_kept() -> None:
    keeping, _ = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    queries, keys = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 12, 8)
    with keeping:
        skipped = earlier_tokens(4, 12, torch.device("cuda"))
        assert isinstance(skipped, CausalBias)
        attended = functional.scaled_dot_product_attention(queries, keys, keys, attn_mask=skipped)
    mask = earlier_tokens(4, 12, torch.device("cpu"))
    expected = functional.scaled_dot_product_attention(queries, keys, keys, attn_mask=mask)
    assert torch.allclose(attended, expected, atol=1e-6)


STAGES = replace(CP, pp=2, accumulation=4, steps=2)


@pytest.mark.parametrize(
    ("kind", "composition"),
    [
        ("llama", replace(STAGES, checkpointing="full", clipping=0.5, schedule="interleaved", virtual_stages=2)),
        ("gpt", replace(STAGES, strategy="ddp", schedule="zero-bubble")),
        ("gpt2", replace(STAGES, strategy="zero2", schedule="gpipe")),
    ],
)
@pytest.mark.sweep(suite={"gpt-composition1"})
def test_stages_of_a_pipeline_share_sequences(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in four_ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5, difference
        assert difference.share < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(STAGES, tp=2, sequence_parallel=True),
        replace(STAGES, cp=4),
        replace(STAGES, pp=4),
        replace(STAGES, dp_replicate=2, strategy="hsdp"),
        replace(STAGES, dp_shard=2, strategy="zero1", schedule="interleaved", virtual_stages=2),
        replace(STAGES, dp_replicate=2, strategy="ddp", precision="bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_eight_ranks_train_as_one_process(eight_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in eight_ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), (
            difference
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "composition",
    [
        replace(CP, dp_shard=2, checkpointing="full"),
        replace(CP, cp=4, strategy="ddp", checkpointing="selective"),
        replace(CP, dp_replicate=2, strategy="ddp", checkpointing="full"),
        replace(CP, tp=2),
        replace(CP, dp_shard=2, strategy="zero1", checkpointing="selective"),
        replace(CP, dp_shard=2, precision="bf16"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
def test_four_ranks_train_as_one_process(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    for difference in four_ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), (
            difference
        )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("positions", "positions that it counts itself"),
        ("eager", "calls it nowhere"),
        ("eager llama", "calls it nowhere"),
        ("bert", "ForMaskedLMLoss"),
        ("mamba", "Conv1d"),
        ("packed", "position_ids do not count on"),
        ("window", "ends after 8"),
        ("tuple", "return_dict"),
    ],
)
def test_what_would_train_wrong_in_silence_is_refused(ranks: RankPool, kind: Unfit, reason: str) -> None:
    for message in ranks.run(parallel_bodies.refused_sequences, kind):
        assert reason in message


@pytest.mark.slow
def test_positions_are_seen_in_blocks_that_are_split_too(four_ranks: RankPool) -> None:
    for message in four_ranks.run(parallel_bodies.refused_sequences, "positions", 2):
        assert "positions that it counts itself" in message


def test_every_stage_refuses_padding_before_it_waits_for_another(four_ranks: RankPool) -> None:
    for message in four_ranks.run(parallel_bodies.refused_in_stages, replace(CP, pp=2, accumulation=4)):
        assert "attention_mask has zeros" in message


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_loss_of_the_scripts_own_is_of_whole_sequences_and_ranks_drop_out_apart(ranks: RankPool, kind: Kind) -> None:
    first, second = ranks.run(parallel_bodies.own_loss, kind)
    for rank in (first, second):
        assert abs(rank.loss - rank.expected) < 1e-5
        assert rank.gradient < 1e-5
    assert first.dropped != second.dropped
    assert first.later == second.later


class _Ranks:
    """Two ranks that have the same tokens."""

    rank, size, is_whole = 1, 2, False


def _doubled(own: torch.Tensor, ranks: object, dim: int = -2, *, sums: bool = False) -> torch.Tensor:
    return torch.cat([own, own], dim=dim)


@pytest.mark.parametrize("watches", [False, True], ids=["alone", "somebody-keeps-what-is-saved"])
def test_keys_of_all_ranks_are_not_kept_for_backward(monkeypatch: pytest.MonkeyPatch, watches: bool) -> None:
    gathered: list[weakref.ref[torch.UntypedStorage]] = []

    def gathers(own: torch.Tensor, ranks: object, dim: int = -2, *, sums: bool = False) -> torch.Tensor:
        whole = _doubled(own, ranks, dim)
        gathered.append(weakref.ref(whole.untyped_storage()))
        return whole

    monkeypatch.setattr(context, "all_chunks", gathers)
    given = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in "qkv"]
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if watches else nullcontext():
        attended = context._attention(_Ranks(), *given, is_causal=True)  # type: ignore[arg-type]
    assert [keys() is not None for keys in gathered] == [watches, watches]
    attended.square().sum().backward()
    assert len(gathered) == (2 if watches else 4)  # once more in backward, for both chunks of queries
    assert all(keys() is None for keys in gathered)
    own = [tensor.grad for tensor in given]
    monkeypatch.setattr(context, "_gather_again", lambda *_: nullcontext())
    fresh = [tensor.detach().requires_grad_() for tensor in given]
    context._attention(_Ranks(), *fresh, is_causal=True).square().sum().backward()  # type: ignore[arg-type]
    for mine, tensor in zip(own, fresh, strict=True):
        torch.testing.assert_close(mine, tensor.grad)
