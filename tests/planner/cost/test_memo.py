"""Memos by fields: none may leave out a field of the configuration that its function reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.activations.figures import _figures_of
from planner.cost.memory.activations.tiled_loss import tiles_of
from planner.cost.memory.states import nominal_states_of, states_of
from planner.cost.precision import recipe_of
from planner.cost.timing.efficiency import _job_rates, rates_of
from planner.cost.timing.layout import layout
from planner.cost.timing.pipeline import _stages
from planner.models.catalogue import find_model
from planner.search.estimate import job_of
from planner.search.request import WorkOptions, make_request
from planner.search.space import configuration_of, enumerate_candidates, micro_batches
from planner.types.job import Job
from planner.types.plan import Configuration

QUESTIONS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "dense": ("opt-6.7b", 8, "A100-SXM4-80GB", {}),
    "deep": ("llama-2-70b", 64, "H100-SXM5-80GB", {"seq_len": 8192}),
    "experts": ("mixtral-8x7b", 32, "H100-SXM5-80GB", {"code": "megatron", "precision": "fp8"}),
    "compiled": ("llama-3.1-8b", 8, "H100-SXM5-80GB", {"code": "torchtitan", "precision": "fp8", "compile": True}),
    "adapters": ("llama-3.1-8b", 4, "RTX-4090", {"method": "qlora"}),
    "wide adapters": ("llama-3.1-8b", 4, "A100-SXM4-80GB", {"method": "lora", "precision": "bf16-pure"}),
    "paged": ("gpt2", 4, "A100-SXM4-80GB", {"precision": "bf16-pure", "optimizer": "adamw-8bit-paged"}),
    "encoder": ("bert-large-uncased", 4, "V100-SXM2-32GB", {"precision": "fp16"}),
    "pairs": ("llama-3.1-8b", 8, "H100-SXM5-80GB", {"task": "dpo", "optimizer": "muon"}),
}


class Watched(Configuration):
    """A configuration that refuses to be read but for what is `allowed`."""

    __slots__ = ("allowed", "plain")
    allowed: frozenset[str]
    plain: Configuration

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        if name.startswith("__") or name in ("allowed", "plain"):
            return own(self, name)
        if name in own(self, "allowed"):
            return getattr(own(self, "plain"), name)
        described = getattr(Configuration, name)
        assert isinstance(described, property), f"{name} is read, and is none of the fields of the memo"
        assert described.fget is not None
        return described.fget(self)


def watched(job: Job, allowed: frozenset[str]) -> Job:
    """Return the job with a configuration of which only some fields can be read."""
    configuration = object.__new__(Watched)
    object.__setattr__(configuration, "allowed", allowed)
    object.__setattr__(configuration, "plain", job.configuration)
    return replace(job, configuration=configuration)


def jobs(name: str) -> Iterator[Job]:
    """Yield candidates of a question, each with other traits than the ones before it."""
    model, gpus, gpu, work = QUESTIONS[name]
    cluster = resolve_cluster(HardwareRequest(gpus=gpus, gpu=gpu))
    request = make_request(find_model(model), cluster, WorkOptions(**work), allow_unrunnable=True)
    for index, candidate in enumerate(enumerate_candidates(request)):
        micros = micro_batches(request, candidate)
        for micro in (micros[index % len(micros)],) if micros else ():
            job = job_of(request, configuration_of(request, candidate, micro))
            yield replace(job, stage=(job.configuration.pp - 1) * (index % 2))


ARGUMENTS: tuple[tuple[Callable[..., Any], Callable[[Job], tuple[Any, ...]]], ...] = (
    (recipe_of, lambda job: ()),
    (states_of, lambda job: (recipe_of(job),)),
    (nominal_states_of, lambda job: (recipe_of(job),)),
    (_figures_of, lambda job: (recipe_of(job), tiles_of(job))),
    (_job_rates, lambda job: (rates_of(job).code, rates_of(job).scaled)),
    (layout, lambda job: ()),
    (_stages, lambda job: (rates_of(job), None if job.counts.trains_all else recipe_of(job))),
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_memo_names_every_field_that_its_function_reads(question: str) -> None:
    for job in list(jobs(question))[::3]:
        for function, arguments_of in ARGUMENTS:
            plain: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
            fields: tuple[str, ...] = function.fields  # type: ignore[attr-defined]
            arguments = arguments_of(job)
            assert plain(watched(job, frozenset(fields)), *arguments) == function(job, *arguments)


def test_a_field_that_is_left_out_is_noticed() -> None:
    job = next(jobs("dense"))
    with pytest.raises(AssertionError, match="precision is read"):
        recipe_of.__wrapped__(watched(job, frozenset({"strategy", "backend"})))  # type: ignore[attr-defined]
