"""The part of the accuracy report on models that ranks split: live bytes and step time of each composition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hardware_db.units import MIB
from scripts.measure.compositions import CompositionRun, predicted_seconds, read_compositions, scored
from scripts.report.accuracy_tables import table

HEAD = """
## Compositions on real ranks

Small LLaMA, GPT-2 and Mixtral models (4 blocks, width 256, 128 tokens) that {ranks} gloo ranks on one machine of
{cores} cores split between them, trained by dsplan's own engine (torch {torch}, transformers {transformers}): live
tensor bytes of the busiest rank, against what `dsplan estimate` says of the same plan
(`python -m scripts.measure.compositions`). Of {rows} runs the median error is {middle:.1%} and the worst {worst:.1%}.
Rows of GPT-2, and of Mixtral in bf16, were to be held out{held}; but GPT-2's errors under tp, up to 10 %, were
looked at, and two mistakes of the model were mended after them: its fused queries, keys and values, and its table of
positions. Its other rows were not.

"own gpt" is the model of scripts/examples/train_gpt.py, "own mixture" the same with experts, and "own grouped" one
with grouped keys and a gated MLP: modules of a user's own, which the planner knows from a trace of what a rank has of
them. Of their {own} runs the median error is {own_middle:.1%} and the worst {own_worst:.1%}.

`time` is the step beside that of the same model, precision and checkpointing under `fsdp` alone on as many ranks, the
measured ratio over the predicted one; no data sheet knows this machine's speed, which cancels. Above 1 the composition
took longer than predicted. Each is the fastest of {steps} steps, while the machine was shared with much other work and
ranks were as many as its cores or more: they show no more than the order of size.
"""
NO_RATIO = "-"


def splits() -> Iterator[str]:
    """The section, line by line."""
    runs = sorted(read_compositions(), key=lambda run: (run.world_size, run.degrees, run.model, run.precision))
    if not runs:
        return
    yield from _head(runs).splitlines()
    yield ""
    columns = (
        "ranks",
        "split",
        "strategy",
        "model",
        "precision",
        "recomputes",
        "predicted",
        "measured",
        "error",
        "time",
    )
    yield from table(columns, [_cells(run, runs) for run in runs])


def _head(runs: Sequence[CompositionRun]) -> str:
    errors = {run: abs(scored(run).error) for run in runs}
    held = [error for run, error in errors.items() if run.is_held_out]
    on_held_out = f" (median {median(held):.1%}, worst {max(held):.1%} of {len(held)})" if held else ""
    own = [error for run, error in errors.items() if run.is_own] or [0.0]
    sizes = sorted({run.world_size for run in runs})
    return HEAD.format(
        ranks=", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}" if len(sizes) > 1 else sizes[0],
        cores=runs[0].cores,
        torch=runs[0].torch,
        transformers=runs[0].transformers,
        rows=len(runs),
        middle=median(errors.values()),
        worst=max(errors.values()),
        held=on_held_out,
        own=len(own),
        own_middle=median(own),
        own_worst=max(own),
        steps=runs[0].steps,
    )


def _cells(run: CompositionRun, runs: Sequence[CompositionRun]) -> list[str]:
    row = scored(run)
    sizes = [f"{size / MIB:,.1f} MiB" for size in (row.predicted_bytes, run.peak_allocated_bytes)]
    backend = " native" if run.backend == "native" else ""
    how = [str(run.world_size), run.degrees, run.strategy + backend, run.model, run.precision]
    return [*how, run.activation_checkpointing, *sizes, f"{row.error:+.1%}", _time_ratio(run, runs)]


def _time_ratio(run: CompositionRun, runs: Sequence[CompositionRun]) -> str:
    """Measured over predicted, each beside the step of the same work that nothing splits; by sample."""
    if run.is_own:
        return NO_RATIO
    alike = [
        other
        for other in runs
        if other.tp * other.pp * other.cp * other.ep == 1
        and (other.model, other.precision, other.activation_checkpointing, other.world_size)
        == (run.model, run.precision, run.activation_checkpointing, run.world_size)
    ]
    if not alike or alike[0] is run:
        return NO_RATIO
    plain = alike[0]
    measured = (run.step_seconds / run.global_batch_size) / (plain.step_seconds / plain.global_batch_size)
    predicted = (predicted_seconds(run) / run.global_batch_size) / (predicted_seconds(plain) / plain.global_batch_size)
    return f"{measured / predicted:.2f}"
