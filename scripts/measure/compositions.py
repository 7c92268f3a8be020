"""Measures the memory and the time of steps that 2, 4 and 8 CPU ranks share, composition by composition.

    python -m scripts.measure.compositions [NAME ...] [--again] [--minutes N]     measure what has no row yet
    python -m scripts.measure.compositions --score                                the planner's error, row by row

Ranks talk over gloo and run dsplan's own engine; live bytes are counted as `scripts.measure.memory` counts them, and
steps are timed afterwards. A NAME is a model or a degree ("gpt2", "tp2"). "own gpt", "own grouped" and "own mixture"
are modules of a user's own (`scripts.measure.modules`), which the planner knows from a trace: `--score` asks it anew.
Rows go to hardware_db/measurements/compositions_cpu.csv as each run ends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, cast

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from hardware_db.measured_rows import SHIPPED, read_rows, write_rows
from hardware_db.probe import probe
from hardware_db.units import MIB
from planner.errors import DsplanError
from planner.models.facts import ModelFacts
from planner.search.estimate import estimate, price, time_step
from planner.search.request import Request
from planner.types.plan import Configuration
from planner.types.plan_io import plan_to_dict
from scripts.measure.gloo import quiet
from scripts.measure.machines import measured_cluster, record
from scripts.measure.measured_run import PHASES, StepMemory, Subject, measure_and_time
from scripts.measure.modules import language_module, language_subject, token_batch
from scripts.measure.term_rows import Scored, TermRun, key_of
from scripts.measure.term_rows import question as ask_question
from scripts.measure.term_rows import scored as scored_by
from scripts.measure.trace_terms import case_of
from strategies.tracing.live import facts_from_module
from strategies.tracing.module_trace import WHOLE, Degrees, traced_facts

ROWS = SHIPPED / "compositions_cpu.csv"
LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 512,
    "vocab_size": 4096,
    "attn_pdrop": 0.0,
}
MIXTRAL: Mapping[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 352,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
EXAMPLE: Mapping[str, Any] = {"own": "example", "layers": 4, "width": 256, "heads": 8, "length": 128}
GROUPED: Mapping[str, Any] = {
    "own": "grouped",
    "layers": 4,
    "width": 256,
    "heads": 8,
    "inner": 704,
    "vocabulary": 4096,
}
MIXTURE: Mapping[str, Any] = {**EXAMPLE, "experts": 4}
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "own gpt": EXAMPLE,
    "own grouped": GROUPED,
    "own mixture": MIXTURE,
}
STEPS = 4
RUN_SECONDS = 150.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CompositionRun(TermRun):
    """A step of a composition: bytes of the busiest rank, and of every rank.

    `step_seconds` is the fastest of so many `steps` of the slowest rank, on `cores` that the ranks share.
    `predicted_bytes` is what was predicted of a module of a user's own, whose trace takes seconds; 0 of others.
    """

    KIND = "composition"

    step_seconds: float = 0.0
    steps: int = 0
    predicted_bytes: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def is_own(self) -> bool:
        """Return whether the model is a module of a user's own, which no config describes."""
        return "own" in self.model_config

    @property
    def is_held_out(self) -> bool:
        """Return whether the cost model was written without the row: those of GPT-2, and of Mixtral in bf16."""
        return self.model == "gpt2" or (self.model == "mixtral" and self.precision == "bf16")

    @property
    def degrees(self) -> str:
        """Return what splits the model, as people write it: `tp 2 x pp 2`."""
        degrees = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        split = " x ".join(degrees) or "data parallel"
        how = "+ sp" if self.sequence_parallel else self.pp_schedule if self.pp > 1 else ""
        return f"{split} {how}".strip()


def _key(run: CompositionRun) -> tuple[object, ...]:
    return key_of(replace(run, step_seconds=0.0, steps=0, predicted_bytes=0))


def read_compositions() -> list[CompositionRun]:
    """Return the rows that come with dsplan."""
    return read_rows(CompositionRun, ROWS)


# The grid.


_DENSE: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp", "tp": 2},
    {"strategy": "ddp", "tp": 2, "sequence_parallel": True},
    {"strategy": "ddp", "pp": 2},
    {"strategy": "fsdp", "cp": 2},
    {"strategy": "ddp", "tp": 2, "dp_replicate": 2},
    {"strategy": "fsdp", "tp": 2, "dp_shard": 2},
    {"strategy": "zero1", "backend": "native", "tp": 2, "dp_shard": 2},
    {"strategy": "zero2", "backend": "native", "tp": 2, "dp_shard": 2},
    {"strategy": "ddp", "tp": 4},
    {"strategy": "fsdp", "tp": 2, "dp_shard": 2, "sequence_parallel": True},
    {"strategy": "ddp", "pp": 2, "dp_replicate": 2},
    {"strategy": "fsdp", "pp": 2, "dp_shard": 2},
    {"strategy": "fsdp", "pp": 2, "dp_shard": 2, "pp_schedule": "gpipe"},
    {"strategy": "ddp", "pp": 4},
    {"strategy": "ddp", "pp": 2, "dp_replicate": 2, "pp_schedule": "interleaved", "virtual_stages": 2},
    {"strategy": "ddp", "tp": 2, "pp": 2},
    {"strategy": "ddp", "tp": 2, "pp": 2, "sequence_parallel": True},
    {"strategy": "fsdp", "cp": 2, "dp_shard": 2},
    {"strategy": "fsdp", "cp": 4},
    {"strategy": "fsdp", "cp": 2, "tp": 2},
    {"strategy": "fsdp", "tp": 2, "pp": 2, "dp_shard": 2},
    {"strategy": "hsdp", "tp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"strategy": "zero1", "backend": "native", "tp": 2, "pp": 2, "dp_shard": 2},
    {"strategy": "fsdp", "cp": 2, "tp": 2, "dp_shard": 2},
)
_MIXTURES: tuple[dict[str, Any], ...] = (
    {"strategy": "fsdp", "dp_shard": 4},
    {"strategy": "fsdp", "dp_shard": 4, "ep": 2},
    {"strategy": "fsdp", "dp_shard": 4, "ep": 4},
    {"strategy": "fsdp", "dp_shard": 2, "cp": 2, "ep": 2},
    {"strategy": "fsdp", "dp_shard": 2, "pp": 2, "ep": 2},
    {"strategy": "fsdp", "tp": 2, "dp_shard": 2},
    {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 4, "ep": 2},
)


_OWN: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp", "dp_replicate": 2},
    {"strategy": "fsdp", "dp_shard": 2},
    {"strategy": "zero2", "backend": "native", "dp_shard": 2},
    {"strategy": "ddp", "tp": 2},
    {"strategy": "ddp", "pp": 2},
    {"strategy": "fsdp", "tp": 2, "dp_shard": 2},
    {"strategy": "zero2", "backend": "native", "tp": 2, "dp_shard": 2},
    {"strategy": "ddp", "tp": 4},
    {"strategy": "fsdp", "pp": 2, "dp_shard": 2},
    {"strategy": "ddp", "tp": 2, "pp": 2},
)
_OWN_EXPERTS: tuple[dict[str, Any], ...] = (
    {"strategy": "fsdp", "dp_shard": 2},
    {"strategy": "fsdp", "dp_shard": 2, "ep": 2},
    {"strategy": "zero2", "backend": "native", "dp_shard": 2, "ep": 2},
    {"strategy": "ddp", "tp": 2},
)
_OWN_SEQUENCES: tuple[dict[str, Any], ...] = ({"strategy": "fsdp", "cp": 2}, {"strategy": "fsdp", "tp": 2, "cp": 2})
"""Of the example alone: blocks that count positions themselves are refused."""


def grid() -> Iterator[CompositionRun]:
    """Return every case: LLaMA and GPT-2 take turns in precision and checkpointing.

    What nothing splits is there in all ways, for step times to be compared with.
    """
    ways: tuple[tuple[str, str], ...] = (("fp32", "none"), ("bf16", "full"))
    for model, (precision, checkpointing) in product(("llama", "gpt2"), ways):
        yield _case(model, precision=precision, activation_checkpointing=checkpointing, strategy="fsdp", dp_shard=4)
    for turn, degrees in enumerate(_DENSE):
        for model, (precision, checkpointing) in zip(("llama", "gpt2"), ways if turn % 2 else ways[::-1], strict=True):
            yield _case(model, precision=precision, activation_checkpointing=checkpointing, **degrees)
    for degrees, model, (precision, checkpointing) in product(_OWN, ("own gpt", "own grouped"), ways):
        yield _case(model, precision=precision, activation_checkpointing=checkpointing, **degrees)
    for degrees, (precision, checkpointing) in product(_OWN_SEQUENCES, ways):
        yield _case("own gpt", precision=precision, activation_checkpointing=checkpointing, **degrees)
    for degrees, (precision, checkpointing) in product(_OWN_EXPERTS, ways):
        yield _case("own mixture", precision=precision, activation_checkpointing=checkpointing, **degrees)
    for degrees, (precision, checkpointing) in product(_MIXTURES, ways):
        yield _case("mixtral", precision=precision, activation_checkpointing=checkpointing, **degrees)


def _case(model: str, **chosen: Any) -> CompositionRun:
    steps = {"micro_batch_size": 2, "gradient_accumulation_steps": 4} if chosen.get("pp", 1) > 1 else {}
    case = case_of(
        "composition", model=model, config=json.dumps(MODELS[model]), device="cpu", optimizer="adamw",
        **{"sequence_length": 128, "micro_batch_size": 8, **steps, **chosen},
    )  # fmt: skip
    return CompositionRun(**{item.name: getattr(case, item.name) for item in fields(TermRun)})


# Asking the planner.


def question(run: CompositionRun) -> tuple[Request, Configuration]:
    """Return the row as `dsplan estimate` would ask it."""
    return ask_question(run, facts_of(run))


def scored(run: CompositionRun) -> Scored:
    """Ask today's planner about a row; of a module of a user's own, read what was predicted when it was asked."""
    if run.predicted_bytes:
        return Scored(run=run, predicted_bytes=run.predicted_bytes, phases={})
    return scored_by(run, facts_of(run))


def facts_of(run: CompositionRun) -> ModelFacts | None:
    """Return what a trace says of a user's own module, as `dsplan.initialize` plans for it; None of other models."""
    if not run.is_own:
        return None
    return _traced(run.config, run.sequence_length, run.precision, (run.tp, run.cp, run.ep, run.sequence_parallel))


@cache
def _traced(config: str, length: int, precision: Any, degrees: Degrees) -> ModelFacts:
    module = language_module(json.loads(config))
    cpu = measured_cluster("cpu", ranks=1).device
    split = () if degrees == WHOLE else (degrees,)
    return traced_facts(facts_from_module(module), module, token_batch(3, length), precision, cpu, split)


# Measuring.


class _Ranks:
    """One pool at a time, for as long as cases can use it."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        self._kind: tuple[int, bool] | None = None

    @staticmethod
    def kind(case: CompositionRun) -> tuple[int, bool]:
        """Return how many ranks there are, and whether they are stages: gloo would wait for those that send nothing."""
        return case.world_size, case.pp > 1

    def of(self, case: CompositionRun) -> RankPool:
        if self._pool is None or self._kind != self.kind(case):
            self.close()
            variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            self._pool = RankPool(case.world_size, timeout_seconds=RUN_SECONDS, variables=variables)
            self._kind = self.kind(case)
            if case.pp == 1:
                quiet(self._pool)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def measure(case: CompositionRun, ranks: _Ranks) -> CompositionRun | None:
    """Return the row of a case; None where the engine does not run it."""
    try:
        plan = estimate(*question(case))
    except DsplanError as problem:  # sequence parallelism of a model without a plan of its own
        print(f"{line_of(case)}: {problem}", flush=True)
        return None
    if not plan.runnable:
        print(f"{line_of(case)}: {plan.notes[0] if plan.notes else 'not runnable'}", flush=True)
        return None
    subject = Subject(config=case.model_config, task="causal-lm", plan=plan_to_dict(plan))
    try:
        make = (language_subject,) if case.is_own else ()
        results = ranks.of(case).run(measure_and_time, subject, STEPS, *make)
        measured = cast("list[tuple[StepMemory, tuple[float, ...]]]", results)
    except RankError as problem:
        ranks.close()
        print(f"{line_of(case)}: {str(problem)[-600:]}", flush=True)
        return None
    memories, seconds = [memory for memory, _ in measured], [times for _, times in measured]
    phases = {name: max(memory.phases[name] for memory in memories) for name in PHASES}
    # A pipeline's micro-batches are in several phases at once.
    seen: dict[str, Any] = {f"{name}_bytes": size for name, size in phases.items()} if case.pp == 1 else {}
    return replace(
        case,
        **seen,
        **record(probe()),
        peak_allocated_bytes=max(phases.values()),
        stages_bytes=" ".join(str(memory.peak_bytes) for memory in memories),
        step_seconds=min(max(step) for step in zip(*seconds, strict=True)),
        steps=STEPS,
    )


def line_of(run: CompositionRun) -> str:
    """Return a row as a line for people."""
    how = f"{run.strategy} x{run.world_size} {run.degrees}"
    name = f"{run.model:8} {how:38} {run.precision:5} {run.activation_checkpointing:5}"
    if not run.peak_allocated_bytes:
        return name
    row = scored(run)
    phases = "  ".join(f"{phase} {100 * row.phase_error(phase):+5.1f}" for phase in row.phases if run.phases[phase])
    outcome = row.refused or f"{100 * row.error:+6.2f} %   {phases}"
    return f"{name} {run.peak_allocated_bytes / MIB:8.1f} MiB {outcome}"


def with_prediction(run: CompositionRun) -> CompositionRun:
    """Return the row of a module of a user's own with what today's planner says of it."""
    asked_anew = replace(run, predicted_bytes=0)
    return replace(run, predicted_bytes=round(scored(asked_anew).predicted_bytes)) if run.is_own else run


def predicted_seconds(run: CompositionRun) -> float:
    """Return what the planner expects a step to take on the run's processor, whose speed nobody has measured."""
    return time_step(price(*question(run))).step_seconds


def measure_all(cases: Sequence[CompositionRun], *, again: bool, deadline: float) -> None:
    """Measure the cases that are missing until a deadline, and write each."""
    ranks = _Ranks()
    try:
        for case in sorted(cases, key=_Ranks.kind):
            rows = {_key(run): run for run in read_compositions()} if ROWS.exists() else {}
            if (_key(case) in rows and not again) or time.monotonic() > deadline:
                continue
            run = measure(case, ranks)
            if run is not None:
                run = with_prediction(run)
                write_rows(CompositionRun, ROWS, {**rows, _key(run): run}.values())
                print(line_of(run), flush=True)
    finally:
        ranks.close()


def _wanted(names: Iterable[str]) -> list[CompositionRun]:
    def matches(case: CompositionRun, name: str) -> bool:
        degrees = {f"{degree}{getattr(case, degree)}" for degree in ("tp", "pp", "cp", "ep")}
        return name in {case.model, case.strategy, case.precision, f"x{case.world_size}", *degrees}

    return [case for case in grid() if all(matches(case, name) for name in names)]


def main() -> None:
    """Measure the compositions that are missing, or all again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="measure the cases that answer to all of them")
    parser.add_argument("--again", action="store_true", help="measure anew what has a row")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no run after this many minutes")
    parser.add_argument("--score", action="store_true", help="compare the rows with the planner, measure nothing")
    arguments = parser.parse_args()
    if not arguments.score:
        measure_all(_wanted(arguments.names), again=arguments.again, deadline=time.monotonic() + 60 * arguments.minutes)
        return
    keys = {_key(case) for case in _wanted(arguments.names)}
    runs = [with_prediction(run) if _key(run) in keys else run for run in read_compositions()]
    for run in runs:
        if _key(run) in keys:
            print(line_of(replace(run, predicted_bytes=0)))
    write_rows(CompositionRun, ROWS, runs)


if __name__ == "__main__":
    main()
