"""Traces training steps with adapters, other losses and split models, and scores the closed forms against them.

    python -m scripts.measure.trace_terms [TERM ...] [--again]     trace what has no row yet
    python -m scripts.measure.trace_terms --score [TERM ...]       the planner's error, row by row and term by term

Rows go to hardware_db/measurements/memory_terms.csv as each trace ends. It needs torch, transformers and peft, no GPU,
and about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from typing import Any

from hardware_db.units import GIB
from planner.search.estimate import price
from planner.types.job import Job
from scripts.measure.term_rows import TERMS, TermRun, key_of, question, read_term_runs, scored, scores, write_term_runs

DEVICE = "H100-SXM5-80GB"
SMALL, LARGE, QWEN = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"


MIXTRAL, QWEN_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"


def grid() -> Iterator[TermRun]:
    """Every case, in the order of the terms."""
    for term in TERMS:
        yield from _CASES.get(term, _none)()


def _none() -> Iterator[TermRun]:
    yield from ()


def case_of(term: str, **chosen: Any) -> TermRun:
    """Return a row with nothing traced yet."""
    values: dict[str, Any] = {
        "model": LARGE,
        "config": "",
        "task": "causal-lm",
        "strategy": "single",
        "backend": "torch",
        "dp_replicate": 1,
        "dp_shard": 1,
        "tp": 1,
        "pp": 1,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "sequence_length": 2048,
        "precision": "bf16",
        "optimizer": "adamw-fused",
        "attention": "sdpa",
        "activation_checkpointing": "none",
        "offload": "none",
        "sync_each_micro_batch": True,
        "device": DEVICE,
        "ranks_per_device": 1,
        "memory_limit_bytes": 0,
        "driver": "",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "deepspeed": "",
        "outcome": "completed",
        **chosen,
    }
    data_ranks = values["dp_replicate"] * values["dp_shard"]
    batch = values["micro_batch_size"] * values["gradient_accumulation_steps"] * data_ranks
    return TermRun(term=term, global_batch_size=batch, **values)


def _adapters(method: str) -> Iterator[TermRun]:
    for model, checkpointing, targets in product((SMALL, LARGE, QWEN), ("none", "full"), ("all-linear", "attention")):
        loaded = ("",) if method == "qlora" else ("fp32", "bf16")
        for load_dtype, precision in product(loaded, ("bf16", "bf16-pure")):
            if (load_dtype, precision) == ("fp32", "bf16-pure"):
                continue
            yield case_of(
                method,
                method=method,
                model=model,
                lora_rank=16 if targets == "all-linear" else 64,
                lora_targets=targets,
                load_dtype=load_dtype,
                precision=precision,
                activation_checkpointing=checkpointing,
                peft=version("peft"),
            )
    if method == "lora":
        for strategy, precision in product(("ddp", "fsdp"), ("bf16", "bf16-pure")):
            degrees = {"dp_shard": 8} if strategy == "fsdp" else {"dp_replicate": 8}
            load = {"load_dtype": "bf16" if precision == "bf16-pure" else "fp32"}
            yield case_of(
                method, method=method, lora_rank=16, lora_targets="all-linear", strategy=strategy, precision=precision,
                peft=version("peft"), **degrees, **load,
            )  # fmt: skip


def _losses(loss: str) -> Iterator[TermRun]:
    # torchtitan, whose chunks these are, runs without autocast.
    precisions = ("bf16", "bf16-pure", "fp32") if loss == "fused" else ("bf16-pure", "fp32")
    for model, precision, checkpointing in product((SMALL, LARGE, QWEN), precisions, ("none", "full")):
        yield case_of(
            f"{loss} loss", loss=loss, model=model, precision=precision, activation_checkpointing=checkpointing,
            micro_batch_size=8 if checkpointing == "full" else 4,
        )  # fmt: skip
    for model in (SMALL, LARGE):
        yield case_of(
            f"{loss} loss", loss=loss, model=model, strategy="fsdp", dp_shard=8, activation_checkpointing="full",
            micro_batch_size=8,
        )  # fmt: skip


def _compiled() -> Iterator[TermRun]:
    for model, precision in product(
        (SMALL, LARGE, QWEN, "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1"), ("bf16", "bf16-pure")
    ):
        yield case_of("compile", model=model, compile=True, precision=precision, micro_batch_size=4)


def _tensor(term: str, *, sequence_parallel: bool) -> Iterator[TermRun]:
    for model, tp, precision, checkpointing in product(
        (SMALL, LARGE), (2, 4, 8), ("bf16", "bf16-pure"), ("none", "full")
    ):
        yield case_of(
            term, model=model, tp=tp, precision=precision, activation_checkpointing=checkpointing,
            sequence_parallel=sequence_parallel, micro_batch_size=4,
        )  # fmt: skip
    for tp, strategy in ((2, "fsdp"), (4, "fsdp"), (2, "ddp")):
        degrees = {"dp_shard": 8 // tp} if strategy == "fsdp" else {"dp_replicate": 2}
        yield case_of(
            term, tp=tp, strategy=strategy, sequence_parallel=sequence_parallel, micro_batch_size=4, **degrees
        )


def _context() -> Iterator[TermRun]:
    for model, cp, precision, checkpointing in product((SMALL, LARGE), (2, 8), ("bf16", "bf16-pure"), ("none", "full")):
        yield case_of(
            "cp", model=model, cp=cp, precision=precision, activation_checkpointing=checkpointing, strategy="fsdp",
            sequence_length=32768, micro_batch_size=1,
        )  # fmt: skip
    yield case_of("cp", cp=4, dp_shard=2, strategy="fsdp", sequence_length=32768, micro_batch_size=1)
    yield case_of("cp", model=SMALL, cp=2, precision="bf16-pure", sequence_length=16384, micro_batch_size=2)


def _experts() -> Iterator[TermRun]:
    for model, (ep, shards), precision, checkpointing in product(
        (MIXTRAL, QWEN_MOE), ((8, 8), (4, 8), (8, 16)), ("bf16", "bf16-pure"), ("none", "full")
    ):
        yield case_of(
            "ep", model=model, ep=ep, dp_shard=shards, precision=precision, activation_checkpointing=checkpointing,
            strategy="fsdp", micro_batch_size=2,
        )  # fmt: skip


def _stages(schedule: str) -> Iterator[TermRun]:
    virtual = 2 if schedule == "interleaved" else 1
    for model, pp, precision, checkpointing in product((SMALL, LARGE), (2, 4), ("bf16", "bf16-pure"), ("none", "full")):
        yield case_of(
            f"stages {schedule}", model=model, pp=pp, pp_schedule=schedule, virtual_stages=virtual, precision=precision,
            activation_checkpointing=checkpointing, micro_batch_size=1, gradient_accumulation_steps=8,
        )  # fmt: skip
    yield case_of(
        f"stages {schedule}", pp=4, pp_schedule=schedule, virtual_stages=virtual, strategy="fsdp", dp_shard=2,
        micro_batch_size=1, gradient_accumulation_steps=8,
    )  # fmt: skip
    yield case_of(
        f"stages {schedule}", pp=4, tp=2, sequence_parallel=True, pp_schedule=schedule, virtual_stages=virtual,
        micro_batch_size=1, gradient_accumulation_steps=8, precision="bf16-pure",
    )  # fmt: skip


_CASES: dict[str, Any] = {
    "lora": lambda: _adapters("lora"),
    "qlora": lambda: _adapters("qlora"),
    "dora": lambda: _adapters("dora"),
    "fused loss": lambda: _losses("fused"),
    "chunked loss": lambda: _losses("chunked"),
    "compile": _compiled,
    "tp": lambda: _tensor("tp", sequence_parallel=False),
    "sp": lambda: _tensor("sp", sequence_parallel=True),
    "cp": _context,
    "ep": _experts,
    "stages 1f1b": lambda: _stages("1f1b"),
    "stages gpipe": lambda: _stages("gpipe"),
    "stages interleaved": lambda: _stages("interleaved"),
}


def traced(case: TermRun) -> TermRun:
    """Return the row of a case."""
    from strategies.tracing.step.refusal import TraceFailed
    from strategies.tracing.step.step import trace_stages

    job = _job_of(case)
    try:
        stages = trace_stages(job)
    except TraceFailed as problem:
        print(f"  {case.term}, {case.model}: {problem}", file=sys.stderr, flush=True)
        return replace(case, outcome="failed")
    phases = {
        name: max(stage.totals.get(name, 0) for stage in stages) for name in ("forward", "loss", "backward", "step")
    }
    return replace(
        case,
        **{f"{name}_bytes": size for name, size in phases.items()},
        peak_allocated_bytes=max(phases.values()),
        stages_bytes=" ".join(str(stage.peak_bytes) for stage in stages),
    )


def _job_of(case: TermRun) -> Job:
    return price(*question(case)).job


def trace_all(terms: set[str], *, again: bool) -> None:
    """Trace what has no row, or everything of the terms `again`; rows of cases that are no longer there go."""
    cases = {key_of(case): case for case in grid()}
    kept = {key_of(run): run for run in read_term_runs() if run.device == "cpu" or key_of(run) in cases}
    for key, case in cases.items():
        if case.term not in terms or (key in kept and not again):
            continue
        kept[key] = run = traced(case)
        order = [*cases, *(other for other in kept if other not in cases)]
        write_term_runs(kept[name] for name in order if name in kept)
        print(line_of(run), flush=True)


def line_of(run: TermRun) -> str:
    """Return a row as a line for people."""
    row = scored(run)
    if run.outcome != "completed":
        return f"{_name(run)}  {run.outcome}"
    if row.refused:
        return f"{_name(run)}  {run.peak_allocated_bytes / GIB:8.2f} GiB  refused: {row.refused}"
    phases = "  ".join(f"{name} {100 * row.phase_error(name):+5.1f}" for name in row.phases if run.phases[name])
    return f"{_name(run)}  {run.peak_allocated_bytes / GIB:8.2f} GiB  peak {100 * row.error:+6.2f} %   {phases}"


def _name(run: TermRun) -> str:
    degrees = [f"{name}{getattr(run, name)}" for name in ("dp_replicate", "dp_shard", "cp", "ep", "tp", "pp")]
    shown = [
        text
        for text, size in zip(degrees, (run.dp_replicate, run.dp_shard, run.cp, run.ep, run.tp, run.pp), strict=True)
        if size > 1
    ]
    how = [run.strategy, run.precision, run.load_dtype, run.lora_targets, *shown, f"b{run.micro_batch_size}"]
    if run.activation_checkpointing != "none":
        how.append(run.activation_checkpointing)
    device = "cpu" if run.device == "cpu" else ""
    return f"{run.term:18} {run.model.rpartition('/')[2]:16} {' '.join(filter(None, how)):52} {device}"


def main() -> None:
    """Trace the cases that are missing and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("terms", nargs="*", metavar="TERM", help=f"of {', '.join(TERMS)}; all by default")
    parser.add_argument("--again", action="store_true", help="trace anew what has a row")
    parser.add_argument("--score", action="store_true", help="compare the rows with the closed forms, trace nothing")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    terms = set(arguments.terms or TERMS)
    if not arguments.score:
        trace_all(terms, again=arguments.again)
    runs = [run for run in read_term_runs() if run.term in terms]
    if arguments.score:
        for run in runs:
            print(line_of(run))
    print(f"\n{'term':20} rows   median    worst")
    for score in scores(runs):
        refused = f"  ({score.refused} refused)" if score.refused else ""
        print(f"{score.term:20} {score.rows:4} {100 * score.median:7.2f} % {100 * score.worst:7.2f} %{refused}")


if __name__ == "__main__":
    main()
