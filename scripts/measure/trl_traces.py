"""Traces the steps of TRL's trainers on fake tensors of models of 8 billion weights, for closed forms to be held to.

    python -m scripts.measure.trl_traces [TRAINER | STRATEGY ...] [--again]     trace what has no row yet
    python -m scripts.measure.trl_traces --score                                the closed forms' error, row by row

Rows go to hardware_db/measurements/trl_traced.csv as each trace ends. It needs torch, transformers, peft and trl, no
GPU, and about ten minutes on one core.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import cycle, product
from statistics import median
from typing import Any

from hardware_db.measured_rows import SHIPPED, MemoryRun, read_rows, write_rows
from hardware_db.units import GIB
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.overhead import library_workspace
from planner.errors import DsplanError
from planner.models.catalogue import find_model
from planner.search.estimate import job_of
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from scripts.measure.trace_terms import DEVICE

ROWS = SHIPPED / "trl_traced.csv"
TRAINERS = ("sft", "sft-lora", "dpo", "dpo-lora", "kto", "kto-lora", "reward", "grpo", "grpo-lora")
STRATEGIES = ("single", "fsdp", "zero2", "zero3")
"""On one card, or on eight; ZeRO is our own, whose steps are traced as a whole."""
MODELS = ("llama-3-8b", "qwen3-8b")
PHASES = ("reference", "logprob", "forward", "loss", "backward", "step")
_ZERO = ("zero2", "zero3")
_RANKS, _BETA, _LORA_RANK = 8, 0.04, 16
_SIZES = ((2, 2048), (4, 512), (1, 4096), (4, 1024), (2, 1024), (1, 2048), (3, 512))
"""Micro-batches and tokens of a sample, a quarter of which are the prompt's; taken in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlTrace(MemoryRun):
    """A traced step of a trainer: bytes of rank 0 by phase."""

    KIND = "traced step of TRL"
    MEASURED = (*MemoryRun.MEASURED, "reference_bytes", "logprob_bytes")

    trainer: str
    prompt_length: int
    trl: str
    peft: str
    reference_bytes: int = 0
    logprob_bytes: int = 0

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase that the step has."""
        sizes = {name: getattr(self, f"{name}_bytes") for name in PHASES}
        return {name: size for name, size in sizes.items() if size}


def read_traces() -> list[TrlTrace]:
    """Return the rows that come with dsplan."""
    return read_rows(TrlTrace, ROWS)


def grid() -> Iterator[TrlTrace]:
    """Yield the cases, in the order of trainers and strategies: of each both models, one of them recomputed."""
    sizes = cycle(_SIZES)
    # Of frozen weights beside our own ZeRO a trace has the activations alone.
    pairs = [pair for pair in product(TRAINERS, STRATEGIES) if not (pair[0].endswith("-lora") and pair[1] in _ZERO)]
    for number, (trainer, strategy) in enumerate(pairs):
        for which, (model, checkpointing) in enumerate(product(MODELS, ("none", "full"))):
            size = next(sizes)
            if (which in (0, 3)) == (number % 2 == 0):
                yield case_of(trainer, strategy, model, checkpointing, size)


def case_of(trainer: str, strategy: str, model: str, checkpointing: str, size: tuple[int, int]) -> TrlTrace:
    """Return a row with nothing traced yet."""
    micro_batch, length = size
    ranks = 1 if strategy == "single" else _RANKS
    shards = ranks if strategy == "fsdp" else 1
    return TrlTrace(
        trainer=trainer,
        model=model,
        config="",
        task=trainer.partition("-")[0],
        strategy=strategy,
        backend="native" if strategy.startswith("zero") else "torch",
        dp_replicate=ranks // shards,
        dp_shard=shards,
        tp=1,
        pp=1,
        gradient_accumulation_steps=1,
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * ranks,
        sequence_length=length,
        prompt_length=length // 4,
        precision="bf16",
        optimizer="adamw-fused",
        attention="sdpa",
        activation_checkpointing=checkpointing,
        offload="none",
        sync_each_micro_batch=True,
        device=DEVICE,
        ranks_per_device=1,
        memory_limit_bytes=0,
        driver="",
        deepspeed="",
        outcome="completed",
        **{name: version(name) for name in ("torch", "transformers", "trl", "peft")},
    )


def job_for(row: TrlTrace) -> Job:
    """Return the row as `dsplan estimate` asks it: GRPO with a reference, generating by itself."""
    completion = row.sequence_length - row.prompt_length
    work: dict[str, Any] = {"task": row.task, "precision": row.precision, "optimizer": row.optimizer}
    work |= {"prompt_len": row.prompt_length, "completion_len": str(completion)}
    if row.task == "grpo":
        work |= {"rollout": "hf", "beta": _BETA, "generations": 2}
    if row.trainer.endswith("-lora"):
        work |= {"method": "lora", "lora_rank": _LORA_RANK, "lora_targets": "all-linear"}
    chosen: dict[str, Any] = {"strategy": row.strategy, "backend": row.backend}
    chosen |= {"steps_per_generation": 2} if row.task == "grpo" else {}
    cluster = resolve_cluster(HardwareRequest(gpu=row.device, gpus=row.world_size))
    request = make_request(find_model(row.model), cluster, WorkOptions(**work))
    options = ExactOptions(micro_batch=row.micro_batch_size, checkpointing=row.activation_checkpointing, **chosen)  # type: ignore[arg-type]
    return job_of(*exact(request, options))


def traced(case: TrlTrace) -> TrlTrace:
    """Return the row of a case.

    Raises:
        TraceFailed: as `trace_step`.
    """
    from strategies.tracing.step.step import trace_step

    totals = trace_step(job_for(case)).totals
    return replace(
        case,
        **{f"{phase}_bytes": totals.get(phase, 0) for phase in PHASES},  # type: ignore[arg-type]
        peak_allocated_bytes=max(totals.values()),
    )


@cache
def closed(row: TrlTrace) -> Mapping[str, float]:
    """Return what closed forms say of the row's phases, without a library's workspace, which no trace has."""
    job = job_for(row)
    workspace = library_workspace(job)
    phases = phases_of(job)
    return {name: phases[name].total - workspace for name in row.peaks}


def error(row: TrlTrace) -> float:
    """Return the closed forms' signed error of the peak, as a share."""
    return max(closed(row).values()) / row.peak_allocated_bytes - 1


def spread_of(rows: Iterable[TrlTrace]) -> tuple[int, float, float]:
    """Return how many rows there are, and the median and the largest of their errors without sign."""
    errors = [abs(error(row)) for row in rows]
    return len(errors), median(errors), max(errors)


def line_of(row: TrlTrace) -> str:
    """Return a row as a line for people."""
    name = f"{row.trainer:10} {row.strategy:7} {row.model:11} {row.micro_batch_size} x {row.sequence_length}"
    predicted = closed(row)
    phases = "  ".join(f"{phase} {100 * (predicted[phase] / size - 1):+5.1f}" for phase, size in row.peaks.items())
    peak = f"{row.peak_allocated_bytes / GIB:7.2f} GiB {100 * error(row):+6.2f} %"
    return f"{name:42} {row.activation_checkpointing:5} {peak}   {phases}"


def _key(row: TrlTrace) -> tuple[object, ...]:
    versions = {"torch", "transformers", "trl", "peft"}
    left_out = {*TrlTrace.MEASURED, *versions, "outcome"}
    return tuple(value for name, value in asdict(row).items() if name not in left_out)


def _trace_all(names: set[str], *, again: bool) -> None:
    """Trace what has no row, or all `again`; rows of cases that are no longer there go."""
    cases = {_key(case): case for case in grid()}
    there = {_key(row) for row in read_traces()}
    for key, case in cases.items():
        if (names and not names & {case.trainer, case.strategy}) or (key in there and not again):
            continue
        try:
            row = traced(case)
        except DsplanError as problem:
            print(f"{case.trainer} {case.strategy} {case.model}: {problem}", file=sys.stderr, flush=True)
            continue
        kept = {**{_key(other): other for other in read_traces()}, key: row}
        write_rows(TrlTrace, ROWS, (kept[each] for each in cases if each in kept))
        print(line_of(row), flush=True)


def main(words: list[str]) -> None:
    """Trace the cases that are missing, or say how far the closed forms lie from the rows."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    names = {word for word in words if not word.startswith("-")}
    if "--score" not in words:
        _trace_all(names, again="--again" in words)
        return
    rows = [row for row in read_traces() if not names or names & {row.trainer, row.strategy}]
    for row in rows:
        print(line_of(row))
    count, middle, worst = spread_of(rows)
    print(f"\n{count} rows: median {100 * middle:.2f} %, worst {100 * worst:.2f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
