"""A run while it goes, and side by side with its plan when it is over."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from dsplan.render.blocks import Block, Column, Table, Text
from hardware_db.units import format_bytes, format_count, format_seconds
from strategies.launch.events import Event, OutputLine, PlanMade, StepDone

if TYPE_CHECKING:
    from rich.live import Live

    from strategies.launch.outcome import Outcome
    from strategies.launch.session import RunReport

# A pipe gets a line for the first step and then at most one in this many seconds.
_LINE_SECONDS = 5.0
_MISSING = "-"


class RunView:
    """Draws the events of a run: a live line on a terminal, plain lines in a pipe. Use as a context manager.

    Rank 0's stdout goes to `out`, everything else to stderr; `ranks` multiplies rank 0's tokens into those of the run.
    """

    def __init__(self, *, ranks: int, out: TextIO) -> None:
        self._ranks = ranks
        self._out = out
        self._live: Live | None = None
        self._last_line = float("-inf")

    def __enter__(self) -> RunView:
        if self._out.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._out, highlight=False, markup=False, emoji=False)
            self._live = Live(console=console, refresh_per_second=8, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)

    def show(self, event: Event) -> None:
        """Draw one event."""
        if isinstance(event, OutputLine):
            self._show_output(event)
        elif isinstance(event, PlanMade):
            self._line(f"plan: {plan_line(event)}")
        else:
            self._show_step(event)

    def _show_output(self, line: OutputLine) -> None:
        text = line.text if line.rank == 0 else f"[rank {line.rank}] {line.text}"
        self._line(text, stderr=line.stream == "stderr")

    def _show_step(self, step: StepDone) -> None:
        text = step_line(step, self._ranks)
        if self._live is not None:
            from rich.text import Text as RichText

            self._live.update(RichText(text, style="bold cyan"))
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self._line(text)

    def _line(self, text: str, *, stderr: bool = False) -> None:
        if self._live is not None:
            from rich.text import Text as RichText

            self._live.console.print(RichText.from_ansi(text))
        else:
            print(text, file=sys.stderr if stderr else self._out, flush=True)


def step_line(step: StepDone, ranks: int) -> str:
    """One step in one line: number, loss, tokens per second over all ranks, memory of rank 0."""
    parts = [f"step {step.step}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    parts.append(f"{format_seconds(step.seconds)}/step")
    if step.tokens and step.seconds > 0:
        parts.append(f"{format_count(step.tokens * ranks / step.seconds)} tokens/s")
    if step.peak_bytes:
        parts.append(f"peak {format_bytes(step.peak_bytes)}")
    return "  ".join(parts)


def plan_line(made: PlanMade) -> str:
    """A plan in one line."""
    plan, memory, seconds = made.plan["plan"], made.plan["memory"], made.plan["time"]["step_seconds"]
    return (
        f"{plan['strategy']} ({plan['backend']}), micro-batch {plan['micro_batch_size']} x accumulation"
        f" {plan['gradient_accumulation_steps']}, {plan['precision']},"
        f" checkpointing {plan['activation_checkpointing']}, offload {plan['offload']};"
        f" predicted {format_bytes(memory['peak_allocated_bytes'])} per rank,"
        f" {format_seconds(seconds)} per step"
    )


def report_blocks(report: RunReport) -> list[Block]:
    """The end of a run: how it ended, predicted beside measured, the loss, and where everything lies."""
    measured = report.measured
    blocks: list[Block] = [_outcome_text(report.outcome, measured.steps)]
    if measured.steps:
        columns = (Column("per step"), Column("predicted", True), Column("measured", True), Column("ratio", True))
        blocks.append(Table(columns=columns, rows=_comparison(report), title="predicted and measured"))
    if measured.first_loss is not None and measured.last_loss is not None:
        blocks.append(Text(text=f"loss {measured.first_loss:.4f} -> {measured.last_loss:.4f}"))
    blocks.append(Text(text=f"run directory {report.spec.directory}"))
    return blocks


def _outcome_text(outcome: Outcome, steps: int) -> Text:
    if outcome.name == "completed":
        return Text(text=f"completed: {steps} steps" if steps else "completed", style="good")
    if outcome.name == "interrupted":
        return Text(text=f"interrupted after {steps} steps; every rank was stopped", style="warning")
    return Text(text=f"{outcome.name.replace('_', ' ')} after {steps} steps", style="bad")


def _comparison(report: RunReport) -> list[list[str]]:
    measured, plan = report.measured, report.plan
    world = report.spec.processes
    predicted_tokens = plan.throughput.tokens_per_second_per_gpu * world if plan else None
    rows = (
        ("peak memory of a rank", plan.memory.peak_allocated_bytes if plan else None, measured.peak_allocated_bytes),
        ("step time", plan.time.step_seconds if plan else None, measured.step_seconds),
        ("tokens/s, all ranks", predicted_tokens, measured.tokens_per_second),
    )
    formats = (format_bytes, format_seconds, format_count)
    return [
        [
            name,
            _MISSING if predicted is None else spell(predicted),
            _MISSING if found is None else spell(found),
            f"{found / predicted:.2f}" if found and predicted else _MISSING,
        ]
        for (name, predicted, found), spell in zip(rows, formats, strict=True)
    ]
