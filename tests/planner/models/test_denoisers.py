"""Denoisers of diffusers: recorded from traces, planned in images."""

from __future__ import annotations

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
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
from planner.vocabulary import Checkpointing, Precision, Strategy
from tests.planner.cost.timing.cases import make_job

DENOISERS = [facts for facts in recorded_models() if facts.kind == "diffusion"]


def request_of(name: str, *, gpus: int = 1, batch: int = 8, **options: object) -> Request:
    cluster = resolve_cluster(HardwareRequest(gpu="H100", gpus=gpus))
    return make_request(find_model(name), cluster, WorkOptions(global_batch=batch, **options))  # type: ignore[arg-type]


PUBLISHED = {"dit-xl-2": 749_826_464, "sd3-medium": 2_028_328_000, "flux": 11_901_408_320}
"""Elements of the published checkpoints, as the Hub's model pages sum them up; recalled, and those of the modules of
diffusers 0.42 on the meta device."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_of_the_published_weights(name: str) -> None:
    facts = find_model(name)
    assert facts.parameters == PUBLISHED[name]
    assert facts.measured_counts is not None
    assert facts.measured_counts.total == facts.parameters


@pytest.mark.parametrize("facts", DENOISERS, ids=lambda facts: facts.recorded_as)
@pytest.mark.sweep(every=2)
def test_the_module_has_these_weights(facts: ModelFacts) -> None:
    pytest.importorskip("diffusers")
    from strategies.tracing.live import counts_from_module
    from strategies.tracing.step.build import subject_of

    assert counts_from_module(subject_of(facts).module).total == facts.parameters


def test_dit_computes_what_its_paper_says() -> None:
    """DiT-XL/2 takes 118.6 Gflops for an image of 256 pixels and 524.6 for one of 512 (arXiv 2212.09748, tables 2 and
    3), which count a multiplication with its addition as one."""
    cluster = resolve_cluster(HardwareRequest(gpu="H100", gpus=1))
    for name, size, published in (("dit-xl-2", 256, 118.6e9), ("dit-xl-2-512", 512, 524.6e9)):
        job = make_job(find_model(name), cluster, strategy="single", sequence_length=(size // 16) ** 2)
        forward = model_flops(job) / 3 / job.configuration.micro_batch_size
        assert forward / 2 == pytest.approx(published, rel=0.03)


def test_plans_are_of_images_and_their_size() -> None:
    small, large = (request_of("sd3-medium", gpus=8, batch=256, image_size=size) for size in (512, 1024))
    assert (small.workload.task, small.workload.sequence_length) == ("diffusion", 1024)
    assert large.workload.sequence_length == 4096
    first, other = (recommend(request).plans[0] for request in (small, large))
    assert first.throughput.samples_per_second > 3 * other.throughput.samples_per_second
    assert first.configuration.splits_model is False
    assert any("denoiser alone" in note for note in first.notes)
    default = request_of("sd3-medium", gpus=8)
    assert default.workload.sequence_length == 4096
    assert any("images of 1024 x 1024 pixels" in text for text in default.defaults)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sd3-medium", {"image_size": 1000}, "no multiple of the 16 pixels.*use 992 or 1008"),
        ("sd3-medium", {"seq_len": 77}, "makes images; use --image-size"),
        ("gpt2", {"image_size": 512}, "is for models that make images"),
        ("flux", {"method": "lora"}, "never traced; use --method full"),
        ("flux", {"task": "causal-lm"}, "use diffusion"),
    ],
)
def test_what_does_not_go_with_images_is_said(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ContradictoryRequest, match=words):
        request_of(name, **options)  # type: ignore[arg-type]


CASES: list[tuple[str, Strategy, Precision, int, int, Checkpointing]] = [
    ("dit-xl-2", "single", "fp32", 8, 256, "none"),
    ("dit-xl-2", "ddp", "bf16", 32, 256, "none"),
    ("dit-xl-2", "single", "bf16-pure", 4, 512, "full"),
    ("sd3-medium", "single", "bf16", 2, 1024, "none"),
    ("sd3-medium", "fsdp", "bf16", 4, 512, "full"),
    ("sd3-medium", "single", "bf16-pure", 4, 768, "none"),
    ("flux", "fsdp", "bf16", 1, 1024, "full"),
    ("flux", "fsdp", "bf16-pure", 2, 512, "none"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "strategy", "precision", "samples", "size", "checkpointing"), CASES)
def test_a_form_holds_for_sizes_and_batches_that_were_never_traced(
    name: str, strategy: Strategy, precision: Precision, samples: int, size: int, checkpointing: Checkpointing
) -> None:
    pytest.importorskip("diffusers")
    from strategies.tracing.step.step import trace_step

    gpus = 1 if strategy == "single" else 8
    request = request_of(name, gpus=gpus, batch=samples * gpus, image_size=size, precision=precision)
    options = ExactOptions(strategy=strategy, micro_batch=samples, checkpointing=checkpointing)
    job = price(*exact(request, options)).job
    traced = trace_step(job)
    predicted = max(ledger.total for ledger in phases_of(job).values()) - library_workspace(job)
    assert predicted == pytest.approx(max(traced.totals.values()), rel=0.02)


def test_an_estimate_names_its_images() -> None:
    plan = estimate(*exact(request_of("dit-xl-2"), ExactOptions(strategy="single", micro_batch=8)))
    assert plan.model["kind"] == "diffusion"
    assert plan.verdict == "fits"
