"""Adapters as PEFT makes them, traced, against the closed forms; and the names of weights against real modules."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.overhead import library_workspace
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.models.counting.trained import _names_in, _parameter
from planner.search.estimate import job_of
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from strategies.tracing.step.build import subject_of
from strategies.tracing.step.step import trace_step
from strategies.tracing.to_hf import shortened

pytest.importorskip("peft")


def job_with_adapters(model: str, checkpointing: Any, samples: int, length: int, **work: Any) -> Job:
    cluster = resolve_cluster(HardwareRequest(gpu="H100", gpus=1))
    options = WorkOptions(seq_len=length, lora_rank=16, **{"precision": "bf16", **work})
    request = make_request(shortened(find_model(model), 4), cluster, options)
    request, configuration = exact(request, ExactOptions(micro_batch=samples, checkpointing=checkpointing))
    return job_of(request, configuration)


@pytest.mark.parametrize(
    ("model", "checkpointing", "samples", "work"),
    [
        ("llama-3-8b", "none", 2, {"method": "lora"}),
        ("llama-3-8b", "full", 4, {"method": "qlora"}),
        ("opt-1.3b", "none", 2, {"method": "lora", "lora_targets": "q_proj,v_proj", "precision": "bf16-pure"}),
        ("gpt2", "none", 8, {"method": "lora", "lora_targets": "c_attn", "load_dtype": "fp32"}),
        ("qwen3-8b", "none", 2, {"method": "dora", "lora_targets": "attention"}),
    ],
)
def test_closed_forms_say_what_traced_adapters_need(
    model: str, checkpointing: str, samples: int, work: dict[str, Any]
) -> None:
    job = job_with_adapters(model, checkpointing, samples, 512, **work)
    traced = trace_step(job)
    closed = max(phases_of(job)[phase].total - library_workspace(job) for phase in traced.totals)
    assert closed == pytest.approx(traced.peak_bytes, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b",
        "qwen2.5-7b",
        "qwen3-8b",
        "gemma-2-9b",
        "phi-3-mini-4k",
        "opt-1.3b",
        "gpt2",
        "pythia-1b",
        "bert-base-uncased",
    ],
)
def test_names_are_those_of_the_real_module(name: str) -> None:
    facts = shortened(find_model(name), 2)
    real = {key: tuple(weight.shape) for key, weight in subject_of(facts).module.named_parameters()}
    counts = count_parameters(facts)
    named = dict(zip((_parameter(facts, each) for each in counts.names), counts.outside, strict=True))
    place = 0
    for block in counts.blocks:
        for _ in range(block.repeats):
            named |= dict(zip(_names_in(facts, block, place), block.shapes, strict=True))
            place += 1
    assert named == real
