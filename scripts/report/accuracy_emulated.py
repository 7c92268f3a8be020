"""The section on emulated cards: peaks that the allocator's rules made of real steps, beside the predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TypeAlias

from hardware_db.measured_rows import EmulatedRun, read_rows
from hardware_db.units import MIB
from scripts.measure.emulated_peaks import ROWS
from scripts.measure.memory_rows import PEAKS, ComparedToEmulated, Peaks, compared_to_emulated
from scripts.report.accuracy_tables import table

HEAD = """
## Against the emulated allocator

Steps trained on emulated cards (`tests/emulated_cuda`), measured with `torch.cuda`'s own counters. **This is an
emulation of the rules of CUDA's caching allocator, and not a card**: numbers come from the CPU's kernels, collectives
travel by gloo, and there is no context, no workspace of cuBLAS (the predictions are without it) and no communicator.
*Requested* is what tensors asked for. *Allocated* adds what the allocator did not split off a block, up to 1 MiB each.
*Reserved* is what it took for both.

The closed forms, which `dsplan recommend` and `estimate` use, say what is requested, and a share by strategy for what
is reserved. A trace (`dsplan estimate --exact`) has the order in which every tensor comes and goes, and a simulated
allocator with the caching allocator's rules follows it through the model's making and three steps: so it says all
three. The models of these runs are of 13 million parameters, where a block of 1 MiB is half a percent.

The table has the rank that needs most, and so has a trace: under our own ZeRO a rank's run of a bucket begins and ends
inside other parameters than its neighbour's, its optimizer makes states and temporaries of other sizes, and LLaMA's
four ranks of zero1 reserve 148, 150, 148 and 170 MiB. Every run has processes of its own: in those of earlier runs,
what these left in segments moved zero3's reserved bytes by up to 16 MiB.

What is left of gpt2 in fp32, 2 MiB, and of ddp with tp 2, 1 MiB, are blocks that were not split, and nothing that was
requested: autograd adds a second gradient to the first in place where nobody else holds that, and makes a new tensor of
fake ones, which leaves other blocks free.

Written by `python -m scripts.measure.emulated_peaks`.
"""


def emulated() -> Iterator[str]:
    """Return the section, line by line."""
    runs = [compared_to_emulated(run) for run in read_rows(EmulatedRun, ROWS) if run.outcome == "completed"]
    if not runs:
        return
    yield HEAD
    shown = {"closed forms": [(run, run.closed) for run in runs]}
    shown["trace"] = [(run, run.traced) for run in runs if run.traced is not None]
    columns = [f"{figure}: {what}" for figure in PEAKS for what in ("median", "worst")]
    yield from table(("by", "strategy", "runs", *columns), (row for by in shown for row in _groups(by, shown[by])))
    yield ""
    columns = [f"{figure} {what}" for figure in PEAKS for what in ("MiB", "closed form", "trace")]
    yield from table(("model", "how", *columns), map(_row, runs))


Predicted: TypeAlias = tuple[ComparedToEmulated, Peaks]


def _groups(by: str, runs: Sequence[Predicted]) -> Iterator[list[str]]:
    yield [by, "all", str(len(runs)), *_cells(runs)]
    for strategy in dict.fromkeys(compared.run.strategy for compared, _ in runs):
        of = [(compared, peaks) for compared, peaks in runs if compared.run.strategy == strategy]
        yield [by, strategy, str(len(of)), *_cells(of)]


def _cells(runs: Sequence[Predicted]) -> Iterator[str]:
    every = [compared.errors(peaks) for compared, peaks in runs]
    for figure in PEAKS:
        errors = [each[figure] for each in every]
        yield f"{median(map(abs, errors)):.1%}"
        yield f"{max(errors, key=abs):+.1%}"


def _row(compared: ComparedToEmulated) -> list[str]:
    run = compared.run
    words = [f"{run.strategy} x {run.world_size}", f"tp {run.tp}" if run.tp > 1 else ""]
    words += [f"{run.micro_batch_size} x {run.sequence_length}", run.precision, run.optimizer]
    words += [f"recompute {run.activation_checkpointing}" if run.activation_checkpointing != "none" else ""]
    words += [f"accumulate {run.gradient_accumulation_steps}" if run.gradient_accumulation_steps > 1 else ""]
    words += [f"offload {run.offload}" if run.offload != "none" else ""]
    closed = compared.errors(compared.closed)
    traced = compared.errors(compared.traced) if compared.traced is not None else {}
    cells = []
    for figure, size in compared.measured.items():
        cells += [f"{size / MIB:.1f}", f"{closed[figure]:+.1%}", f"{traced[figure]:+.1%}" if traced else "-"]
    return [run.model, ", ".join(word for word in words if word), *cells]
