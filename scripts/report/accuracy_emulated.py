"""The section on emulated cards: peaks that the allocator's rules made of real steps, beside the predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hardware_db.measured_rows import EmulatedRun, read_rows
from hardware_db.units import MIB
from scripts.measure.emulated_peaks import ROWS
from scripts.measure.memory_rows import ComparedToEmulated, compared_to_emulated
from scripts.report.accuracy_tables import table

HEAD = """
## Against the emulated allocator

Steps trained on emulated cards (`tests/emulated_cuda`), measured with `torch.cuda`'s own counters. **This is an
emulation of the rules of CUDA's caching allocator, and not a card**: numbers come from the CPU's kernels, collectives
travel by gloo, and there is no context, no workspace of cuBLAS (the predictions are without it) and no communicator.
*Requested* is what tensors asked for. *Allocated* adds what the allocator did not split off a block, up to 1 MiB each,
which no prediction knows: the tensors of these models are of a few MiB. *Reserved* is what it took for both; the
prediction is a margin by strategy, from runs of larger models.

Written by `python -m scripts.measure.emulated_peaks`.
"""


def emulated() -> Iterator[str]:
    """Return the section, line by line."""
    runs = [compared_to_emulated(run) for run in read_rows(EmulatedRun, ROWS) if run.outcome == "completed"]
    if not runs:
        return
    yield HEAD
    figures = ("requested", "allocated", "reserved")
    columns = [f"{figure}: {what}" for figure in figures for what in ("median", "worst")]
    groups = [("all", runs)]
    for strategy in dict.fromkeys(run.run.strategy for run in runs):
        groups.append((strategy, [run for run in runs if run.run.strategy == strategy]))
    yield from table(("strategy", "runs", *columns), ([name, str(len(of)), *_cells(of)] for name, of in groups))
    yield ""
    columns = ["requested MiB", "error", "allocated MiB", "error", "reserved MiB", "error"]
    yield from table(("model", "how", *columns), map(_row, runs))


def _cells(runs: Sequence[ComparedToEmulated]) -> Iterator[str]:
    for errors in zip(*map(_errors, runs), strict=True):
        yield f"{median(map(abs, errors)):.1%}"
        yield f"{max(errors, key=abs):+.1%}"


def _errors(run: ComparedToEmulated) -> tuple[float, float, float]:
    return run.requested_error, run.error(), run.reserved_error


def _row(compared: ComparedToEmulated) -> list[str]:
    run = compared.run
    words = [f"{run.strategy} x {run.world_size}", f"tp {run.tp}" if run.tp > 1 else ""]
    words += [f"{run.micro_batch_size} x {run.sequence_length}", run.precision, run.optimizer]
    words += [f"recompute {run.activation_checkpointing}" if run.activation_checkpointing != "none" else ""]
    words += [f"accumulate {run.gradient_accumulation_steps}" if run.gradient_accumulation_steps > 1 else ""]
    words += [f"offload {run.offload}" if run.offload != "none" else ""]
    sizes = compared.requested_bytes, run.peak_allocated_bytes, run.peak_reserved_bytes
    pairs = zip(sizes, _errors(compared), strict=True)
    cells = [cell for size, error in pairs for cell in (f"{size / MIB:.1f}", f"{error:+.1%}")]
    return [run.model, ", ".join(word for word in words if word), *cells]
