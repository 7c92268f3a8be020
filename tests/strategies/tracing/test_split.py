"""Split models and training code in traces: what ranks keep, and rows against closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.models.catalogue import find_model
from planner.search.estimate import price
from planner.types.job import Job
from scripts.measure.term_rows import TERMS, TermRun, question, read_term_runs, scores
from scripts.measure.trace_terms import case_of
from strategies.tracing.step.step import TracedStep, trace_stages, trace_step
from strategies.tracing.to_hf import shortened

RUNS = read_term_runs()


def test_every_term_has_rows() -> None:
    assert {run.term for run in RUNS} == set(TERMS)


def job_of(case: TermRun, layers: int = 4) -> Job:
    """The job of a case on a model of a few blocks."""
    job = price(*question(case)).job
    facts = shortened(find_model(case.model), layers)
    return replace(job, facts=facts)


def traced(term: str, layers: int = 4, **chosen: Any) -> TracedStep:
    case = case_of(
        term, **{"model": "meta-llama/Llama-3.2-1B", "sequence_length": 512, "micro_batch_size": 1, **chosen}
    )
    return trace_step(job_of(case, layers))


@pytest.mark.parametrize("term", TERMS)
def test_closed_forms_say_what_traces_of_a_term_say(term: str) -> None:
    (score,) = scores(run for run in RUNS if run.term == term)
    assert score.refused == 0
    assert score.median <= 0.01
    assert score.worst <= 0.05


@pytest.mark.slow
def test_split_sequences_keep_less_than_split_weights() -> None:
    """Norms and residuals are whole on every rank without sequence parallelism; so are logits in both."""
    whole = traced("tp", tp=4)
    split = traced("sp", tp=4, sequence_parallel=True)
    assert split.totals["forward"] < whole.totals["forward"] < traced("tp").totals["forward"]


@pytest.mark.slow
def test_a_part_of_the_sequence_makes_a_part_of_the_logits() -> None:
    whole, part = (traced("cp", strategy="fsdp", cp=cp, dp_shard=4 // cp) for cp in (1, 4))
    kept = [step.phases["loss"]["activations"] for step in (whole, part)]
    assert kept[1] == pytest.approx(kept[0] / 4, rel=0.05)


@pytest.mark.slow
def test_spread_experts_leave_a_rank_its_own() -> None:
    sharing = {"model": "mistralai/Mixtral-8x7B-v0.1", "strategy": "fsdp", "dp_shard": 8, "layers": 2}
    together, spread = traced("ep", **sharing), traced("ep", ep=8, **sharing)
    assert spread.phases["step"]["parameters"] == pytest.approx(together.phases["step"]["parameters"], rel=0.01)
    assert spread.phases["forward"]["buffers"] < 0.3 * together.phases["forward"]["buffers"]


@pytest.mark.slow
def test_the_last_stage_alone_has_the_logits() -> None:
    chosen = {"pp": 2, "gradient_accumulation_steps": 4, "sequence_length": 512, "micro_batch_size": 1}
    first, last = trace_stages(job_of(case_of("stages 1f1b", model="meta-llama/Llama-3.2-1B", **chosen)))
    assert "loss" not in first.phases
    assert last.phases["loss"]["activations"] > 512 * 128256 * 6


@pytest.mark.slow
def test_losses_without_whole_logits_and_compiled_blocks_keep_less() -> None:
    plain = traced("fused loss", precision="bf16-pure", layers=2, micro_batch_size=4)
    for chosen in ({"loss": "fused"}, {"loss": "chunked"}):
        other = traced("fused loss", precision="bf16-pure", layers=2, micro_batch_size=4, **chosen)
        assert other.phases["backward"]["activations"] < 0.6 * plain.phases["backward"]["activations"]
    compiled = traced("compile", precision="bf16-pure", layers=2, micro_batch_size=4, compile=True)
    assert compiled.phases["loss"]["activations"] < plain.phases["loss"]["activations"]
