"""Measures peaks of whole training steps on emulated cards, beside what dsplan predicts for the same plans.

    python -m scripts.measure.emulated_peaks                      # hardware_db/measurements/memory_emulated.csv
    python -m scripts.measure.emulated_peaks --only fsdp --again  # some strategies, measured anew
    python -m scripts.measure.emulated_peaks --trace              # what traces predict of all rows, without the cards

The cards are those of `tests/emulated_cuda`: torch's Python and autograd, the rules of the caching allocator, numbers
by the CPU's kernels. So the figures say what the allocator makes of a training step, and not what a card needs: there
is no context, no library's workspace and no communicator. Every run becomes a row as soon as it is done; runs that
have a row are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from hardware_db.measured_rows import SHIPPED, EmulatedRun, read_rows, write_rows
from hardware_db.units import GIB, MIB
from planner import vocabulary as words
from planner.search.estimate import estimate
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import plan_to_dict
from scripts.measure.measured_run import StepMemory, Subject, measure_subject
from scripts.measure.memory_grid import SMALL
from scripts.measure.memory_rows import compared_to_emulated, question_of, traced_emulated
from tests.emulated_cuda import Card, environment
from tests.preload import PRELOAD

ROWS = SHIPPED / "memory_emulated.csv"
DEVICE = "H100-SXM5-80GB"
RUN_SECONDS = 1200.0
_LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 8, "max_position_embeddings": 2048}
MODELS = {
    "llama": {
        **_LAYERS,
        "hidden_size": 512,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
        "vocab_size": 4096,
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 512, "n_layer": 3, "n_head": 8, "vocab_size": 4096, "n_positions": 1024},
    "gpt2-deep": {"n_embd": 256, "n_layer": 8, "n_head": 4, "vocab_size": 8192, "n_positions": 1024},
    "qwen3": SMALL["qwen3"],
}
"""Sizes by name, of 10 to 15 million parameters. Qwen's widths are no multiples of what the allocator rounds to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run to measure, in the words of a plan."""

    model: str
    strategy: words.Strategy
    ranks: int
    tp: int = 1
    micro_batch: int = 2
    length: int = 256
    accumulation: int = 1
    precision: words.Precision = "bf16"
    optimizer: words.Optimizer = "adamw"
    attention: words.Attention = "sdpa"
    checkpointing: words.Checkpointing = "none"
    offload: words.Offload = "none"


def grid() -> Iterator[Case]:
    """Every strategy on one model over ranks, then what else a run can differ in."""
    strategies: tuple[words.Strategy, ...] = ("ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3")
    yield Case(model="llama", strategy="single", ranks=1)
    for strategy in strategies:
        for ranks in (2, 4, 8) if strategy in ("fsdp", "zero3") else (2, 4):
            yield Case(model="llama", strategy=strategy, ranks=ranks)
    for strategy in ("single", "ddp", "fsdp", "zero2", "zero3"):
        ranks = 1 if strategy == "single" else 2
        yield Case(model="gpt2", strategy=strategy, ranks=ranks, precision="fp32")
        yield Case(model="gpt2-deep", strategy=strategy, ranks=ranks, checkpointing="full", micro_batch=4)
        yield Case(model="qwen3", strategy=strategy, ranks=ranks, accumulation=3, optimizer="adamw-fused")
    for strategy in ("fsdp", "zero3"):
        yield Case(model="llama", strategy=strategy, ranks=2, offload="all")
    for strategy in ("zero1", "zero2", "zero3"):
        yield Case(model="llama", strategy=strategy, ranks=2, offload="optimizer")
    yield Case(model="gpt2", strategy="fsdp", ranks=2, precision="fp32", offload="all")
    yield Case(model="gpt2-deep", strategy="zero3", ranks=2, checkpointing="full", micro_batch=4, offload="all")
    yield Case(model="qwen3", strategy="fsdp", ranks=2, accumulation=3, optimizer="adamw-fused", offload="all")
    yield Case(model="qwen3", strategy="zero2", ranks=2, accumulation=3, optimizer="adamw-fused", offload="optimizer")
    for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        yield Case(model="llama", strategy=strategy, ranks=2 if strategy == "ddp" else 4, tp=2)


def question(case: Case) -> tuple[EmulatedRun, Plan]:
    """Return the row of a case with nothing measured, and the plan that its engine runs."""
    whole = case.strategy in ("single", "ddp")
    spread = case.ranks // case.tp
    configuration = Configuration(
        strategy=case.strategy,
        backend="native" if case.strategy in words.ZERO_STAGES else "torch",
        dp_replicate=spread if whole else 1,
        dp_shard=1 if whole else spread,
        tp=case.tp,
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        global_batch_size=case.micro_batch * case.accumulation * spread,
        sequence_length=case.length,
        precision=case.precision,
        optimizer=case.optimizer,
        attention=case.attention,
        activation_checkpointing=case.checkpointing,
        offload=case.offload,
    )
    columns: dict[str, Any] = {
        "model": case.model,
        "config": json.dumps({"model_type": case.model.split("-")[0], **MODELS[case.model]}),
        "task": "causal-lm",
        "device": DEVICE,
        "ranks_per_device": 1,
        "memory_limit_bytes": 0,
        "driver": "emulated",
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
    }
    row = EmulatedRun(**columns, **_of_row(configuration), outcome="failed")
    return row, estimate(*question_of(row))


def _of_row(configuration: Configuration) -> dict[str, Any]:
    columns = {item.name for item in fields(EmulatedRun)}
    return {name: value for name, value in asdict(configuration).items() if name in columns}


def measure(row: EmulatedRun, plan: Plan, ranks: RankPool) -> EmulatedRun:
    """Return the row with what the busiest rank allocated and reserved."""
    subject = Subject(config=row.model_config, task=cast("words.Task", row.task), plan=plan_to_dict(plan))
    try:
        steps = cast("list[StepMemory]", ranks.run(measure_subject, subject))
    except RankError as problem:
        print(str(problem)[:6000], file=sys.stderr)
        return row
    busiest = max(steps, key=lambda rank: rank.peak_bytes)
    return replace(
        row,
        outcome="completed",
        resident_bytes=busiest.resident_bytes,
        peak_allocated_bytes=busiest.peak_bytes,
        peak_requested_bytes=busiest.requested_bytes,
        peak_reserved_bytes=max(rank.reserved_bytes for rank in steps),
        **{f"{phase}_bytes": size for phase, size in busiest.phases.items()},
    )


def main() -> None:
    """Measure the cases that are missing and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="STRATEGY", help="measure these strategies alone")
    parser.add_argument("--ranks", type=int, nargs="*", help="measure runs of so many cards alone")
    parser.add_argument("--model", nargs="*", help="measure these models alone")
    parser.add_argument("--again", action="store_true", help="measure anew what has a row")
    parser.add_argument("--trace", action="store_true", help="trace the plans of the rows anew, and measure nothing")
    parser.add_argument("--out", type=Path, default=ROWS, help="the CSV file to add to")
    arguments = parser.parse_args()
    runs = {run.key: run for run in read_rows(EmulatedRun, arguments.out)}
    if arguments.trace:
        for run in (run for run in list(runs.values()) if not arguments.only or run.strategy in arguments.only):
            runs[run.key] = traced_emulated(run)
            write_rows(EmulatedRun, arguments.out, runs.values())
            print(line_of(runs[run.key]), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="dsplan-emulated-") as folder:
        os.environ.update(environment([Card(total_memory=8 * GIB)] * 8, Path(folder)))
        for case in _chosen(arguments):
            row, plan = question(case)
            if row.key in runs and runs[row.key].outcome == "completed" and not arguments.again:
                continue
            # In processes of its own: what an earlier run left in segments would decide what is reserved. They are
            # forked from one, which has the cards and has imported torch.
            options: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl", "preload": PRELOAD}
            with RankPool(case.ranks, timeout_seconds=RUN_SECONDS, **options) as pool:
                runs[row.key] = measured = measure(row, plan, pool)
            write_rows(EmulatedRun, arguments.out, runs.values())
            print(line_of(measured), flush=True)


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    cases = [case for case in grid() if not arguments.only or case.strategy in arguments.only]
    cases = [case for case in cases if not arguments.model or case.model in arguments.model]
    cases = [case for case in cases if not arguments.ranks or case.ranks in arguments.ranks]
    return sorted(cases, key=lambda case: case.ranks)


def line_of(run: EmulatedRun) -> str:
    """Return a run in a line, with the errors of its peaks by the closed forms and by a trace."""
    how = [run.precision, run.optimizer, f"b{run.micro_batch_size}x{run.gradient_accumulation_steps}"]
    how += [word for word in (run.activation_checkpointing, run.offload) if word != "none"]
    how += [f"tp{run.tp}"] if run.tp > 1 else []
    name = f"{run.model:12} {run.strategy:13} x{run.world_size} {' '.join(how):34}"
    if run.outcome != "completed":
        return f"{name} {run.outcome}"
    compared = compared_to_emulated(run)
    sizes = [f"{figure} {size / MIB:7.1f}" for figure, size in compared.measured.items()]
    for predicted in filter(None, (compared.closed, compared.traced)):
        sizes = [
            f"{words} {100 * error:+5.1f} %"
            for words, error in zip(sizes, compared.errors(predicted).values(), strict=True)
        ]
    return f"{name} {'  '.join(sizes)}"


if __name__ == "__main__":
    main()
