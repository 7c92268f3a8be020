"""Models that were recorded from traces at their real widths, instead of being described by figures."""

from __future__ import annotations

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.activations.form import find_form, structure_of
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.overhead import library_workspace
from planner.cost.timing.flops import model_flops
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model, recorded_models
from planner.models.facts import ModelFacts
from planner.search.estimate import estimate, price
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.search.search import recommend
from strategies.tracing import to_hf as builder
from strategies.tracing.live import counts_from_module
from strategies.tracing.step.step import trace_step
from tests.planner.cost.timing.cases import make_job
from tests.planner.models.hf_modules import meta_model, real_count

# Denoisers are diffusers' modules and not transformers': tests/planner/models/test_denoisers.py has the same of them.
OF_TRANSFORMERS = [facts for facts in recorded_models() if facts.kind != "diffusion"]
MODELS = pytest.mark.parametrize("facts", OF_TRANSFORMERS, ids=lambda facts: facts.recorded_as)


@MODELS
@pytest.mark.sweep(every=3)
def test_the_count_is_that_of_the_module(facts: ModelFacts) -> None:
    module = meta_model(builder.hf_config(facts), facts)
    counts = counts_from_module(module)
    assert facts.parameters == real_count(module) == counts.total
    assert facts.measured_counts is not None
    assert facts.measured_counts.total == facts.parameters
    blocks = {type(part).__name__ for part in module.modules()}
    assert set(facts.block_class.split(",")) <= blocks


@MODELS
def test_every_precision_has_a_form_of_the_models_own(facts: ModelFacts) -> None:
    names = {work.block for work in facts.work if work.block}
    for mode in ("fp32", "autocast", "pure"):
        form = find_form(structure_of(facts), [f"cuda {mode} eager"])
        assert form is not None
        assert form.differences == 0
        assert set(form.form.blocks) == names


PUBLISHED = {
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-790m": 793_204_224,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "codestral-mamba": 7_285_403_648,
    "llava-1.5-7b": 7_063_427_072,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
}
"""Elements of the published checkpoints, as the Hub's model pages sum them up."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert find_model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "share"), [("llama-4-scout", 17e9), ("llama-4-maverick", 17e9), ("qwen3-next", 3.9e9)]
)
def test_a_token_passes_through_the_experts_that_it_is_sent_to(name: str, share: float) -> None:
    """Llama 4's are published with 17 billion active parameters, Qwen3-Next's with 3 besides its embeddings."""
    assert find_model(name).active_parameters == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("name", ["llama-4-scout", "codestral-mamba", "llava-1.5-7b", "qwen3-next", "qwen2.5-vl-7b"])
def test_operations_are_about_six_for_each_parameter_that_a_token_meets(name: str) -> None:
    facts = find_model(name)
    # transformers' Llama 4 sends every token through every expert.
    met = facts.parameters if facts.family == "llama4" else facts.active_parameters
    job = make_job(facts, resolve_cluster(HardwareRequest(gpu="H100", gpus=1)), strategy="single", sequence_length=2048)
    tokens = job.tokens_per_micro_batch
    # Embeddings are looked up; attention, scans and an image's own tokens come on top.
    assert 0.8 < model_flops(job) / (6 * met * tokens) < 1.2


def request_of(name: str, gpus: int, samples: int, length: int) -> Request:
    """Of a job in bf16 on H100s."""
    cluster = resolve_cluster(HardwareRequest(gpu="H100", gpus=gpus))
    work = WorkOptions(seq_len=length, global_batch=samples * gpus, precision="bf16")
    return make_request(find_model(name), cluster, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "length"),
    [
        ("mamba-130m", 2, 128),
        ("codestral-mamba", 2, 768),
        ("qwen3-next", 1, 512),
        ("llama-4-scout", 1, 1536),
        ("llama-4-maverick", 2, 700),
        ("llava-1.5-7b", 2, 1024),
        ("qwen2-vl-2b", 2, 1024),
        ("qwen2.5-vl-3b", 1, 700),
    ],
)
def test_a_form_holds_for_lengths_and_batches_that_were_never_traced(name: str, samples: int, length: int) -> None:
    options = ExactOptions(strategy="single", micro_batch=samples)
    job = price(*exact(request_of(name, 1, samples, length), options)).job
    traced = trace_step(job)
    for phase in ("loss", "backward", "step"):
        predicted = phases_of(job)[phase].total - library_workspace(job)
        assert predicted == pytest.approx(traced.totals[phase], rel=0.01)


def test_plans_of_a_recorded_model_keep_it_whole() -> None:
    answer = recommend(request_of("llama-4-scout", 64, 1, 2048))
    assert answer.plans
    assert {plan.configuration.tp * plan.configuration.pp for plan in answer.plans} == {1}
    with pytest.raises(ContradictoryRequest, match="nothing is known of how"):
        estimate(*exact(request_of("mamba-130m", 8, 1, 2048), ExactOptions(strategy="ddp", tp=2)))
    with pytest.raises(ContradictoryRequest, match="use causal-lm"):
        make_request(find_model("mamba-130m"), request_of("mamba-130m", 1, 1, 8).cluster, WorkOptions(task="seq-cls"))
