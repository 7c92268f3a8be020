"""Recommended plans of models at their public shapes are near what their authors trained with, and rules say what
cannot be split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import ContradictoryRequest
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request
from planner.search.search import Recommendation, recommend
from planner.types.plan import Plan
from tests.planner.search.questions import question


def unlimited(model: str, gpu: str, gpus: int, **options: Any) -> Request:
    """Every plan, whoever runs it, on hosts that have room to load the model."""
    request = question(model, gpu, gpus, allow_unrunnable=True, **options)
    return replace(request, cluster=replace(request.cluster, host_memory_bytes_per_node=0))


def answer(model: str, gpu: str, gpus: int, **options: Any) -> Recommendation:
    return recommend(unlimited(model, gpu, gpus, **options))


def exactly(request: Request, **options: Any) -> Plan:
    batch = request.workload.global_batch_size
    return estimate(*exact(request, ExactOptions(micro_batch=1, global_batch=batch, **options)))


def test_llama_405b_on_16384_gpus() -> None:
    """tp 8, pp 16, dp 128 of 8k tokens, 2048 samples (Llama Team 2024, arXiv 2407.21783, table 4)."""
    ranking = answer("llama-3.1-405b", "H100-SXM5-80GB", 16384, seq_len=8192, global_batch=2048, code="megatron")
    fastest = min(ranking.plans, key=lambda plan: plan.time.step_seconds)
    chosen = fastest.configuration
    assert (chosen.tp, chosen.pp, chosen.cp, chosen.dims.data_parallel) == (8, 16, 1, 128)
    assert chosen.sequence_parallel
    assert chosen.pp_schedule == "interleaved"
    assert fastest.verdict == "fits"


def test_llama_405b_at_128k_tokens() -> None:
    """tp 8, cp 16, pp 16, dp 8 (arXiv 2407.21783, table 4), 16 samples of 131072 tokens in the paper's global batch."""
    ranking = answer("llama-3.1-405b", "H100-SXM5-80GB", 16384, seq_len=131072, global_batch=128, code="megatron")
    sharded = next(plan.configuration for plan in ranking.plans if plan.configuration.strategy == "zero1")
    assert sharded.tp == 8
    assert sharded.pp in (16, 32)
    assert sharded.cp in (8, 16, 32)
    assert min(ranking.plans, key=lambda plan: plan.time.step_seconds).configuration.cp > 1


def test_128k_tokens_of_llama_8b_on_one_node() -> None:
    plan = answer("llama-3-8b", "H100-SXM5-80GB", 8, seq_len=131072, global_batch=8)
    first = plan.plans[0]
    assert first.configuration.cp == 8
    assert first.configuration.strategy == "fsdp"
    assert first.verdict == "fits"
    assert first.throughput.mfu is not None
    assert first.throughput.mfu > 0.3


def test_llama_70b_at_32k_tokens_on_eight_nodes() -> None:
    plan = answer("llama-3-70b", "H100-SXM5-80GB", 64, seq_len=32768, global_batch=64)
    first = plan.plans[0]
    assert first.configuration.cp > 1
    assert first.verdict == "fits"


def test_deepseek_v3_on_2048_h800() -> None:
    """pp 16, ep 64, ZeRO-1 (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2), 15360 samples of 4096 tokens."""
    request = unlimited("deepseek-v3", "H800-SXM5-80GB", 2048, seq_len=4096, global_batch=15360, code="megatron")
    public = exactly(request, strategy="zero1", pp=16, ep=64, checkpointing="full")
    assert public.verdict == "fits"
    first = recommend(request).plans[0]
    chosen = first.configuration
    assert chosen.strategy == "zero1"
    assert chosen.ep >= 8
    assert chosen.pp in (8, 16, 32)
    assert first.time.step_seconds < public.time.step_seconds


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        ("llama-3-8b", {"cp": 8, "seq_len": 4100}, "cp 8 cuts samples into 16 parts"),
        ("bert-base", {"cp": 2}, "cp 2 is for decoders"),
        ("bloom-560m", {"cp": 2}, "cp 2 needs fused attention"),
        ("llama-3-8b", {"ep": 8, "strategy": "fsdp"}, "ep 8 spreads experts over ranks"),
        ("mixtral-8x7b", {"ep": 16, "strategy": "fsdp"}, "does not divide the 8 experts"),
        ("mixtral-8x7b", {"ep": 8, "tp": 2, "strategy": "fsdp"}, "needs sequence parallelism"),
        ("llama-3-8b", {"sequence_parallel": True}, "give tp of at least 2"),
        ("llama-3-8b", {"sequence_parallel": True, "tp": 8, "seq_len": 4100}, "cuts 4100 tokens over tp 8"),
        ("llama-3-8b", {"pp_schedule": "zero-bubble"}, "schedule zero-bubble is for a pipeline"),
        ("llama-3-8b", {"virtual_stages": 2}, "virtual stages .2. are for a pipeline"),
        ("llama-3-8b", {"pp": 4, "virtual_stages": 2}, "are for schedule interleaved, not 1f1b"),
        ("llama-3-8b", {"pp": 4, "pp_schedule": "interleaved"}, "needs virtual stages of at least 2"),
        (
            "llama-3-8b",
            {"pp": 4, "pp_schedule": "interleaved", "virtual_stages": 16, "grad_accum": 4},
            "pp 4 x virtual stages 16 = 64 is more than the 32 blocks",
        ),
        (
            "llama-3-8b",
            {"pp": 4, "pp_schedule": "interleaved", "virtual_stages": 2, "grad_accum": 6},
            "use gradient accumulation 8",
        ),
        ("gpt2", {"tp": 2, "sequence_parallel": True}, "no tensor-parallel plan of gpt2"),
        ("mamba-130m", {"cp": 2}, "nothing is known of how"),
    ],
)
def test_what_cannot_be_split_is_said_in_one_sentence(model: str, options: dict[str, Any], problem: str) -> None:
    work = {"seq_len": options.pop("seq_len")} if "seq_len" in options else {}
    request = question(model, "H100-SXM5-80GB", 64 if "ep" in options else 16, **work)
    with pytest.raises(ContradictoryRequest, match=problem):
        estimate(*exact(request, ExactOptions(**{"strategy": "ddp", **options})))


def test_whole_experts_are_a_note() -> None:
    """Mixtral's 8 experts under FSDP2 on 64 ranks, 21 GiB of them on some."""
    plan = exactly(question("mixtral-8x7b", "H100-SXM5-80GB", 64, global_batch=64), strategy="fsdp")
    note = next(note for note in plan.notes if "whole experts" in note)
    assert "21.0 GiB of expert weights where an even share is 2.6 GiB" in note
    assert "--ep" in note


def test_experts_are_spread_where_it_is_fastest() -> None:
    """Mixtral 8x22B under ZeRO-1 on 64 A100s fits only split, and an expert on each GPU of a node beats all others."""
    request = replace(unlimited("mixtral-8x22b", "A100-SXM4-80GB", 64, seq_len=4096), strategies=("zero1",))
    answered = recommend(request)
    assert answered.plans[0].configuration.ep == 8
    assert all(plan.configuration.splits_model for plan in answered.plans)
