"""A run while it goes."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from dsplan.render.charts import sparkline
from dsplan.render.show import can_redraw, takes_blocks, terminal
from hardware_db.notices import label_lines, printable
from hardware_db.units import format_bytes, format_count, format_seconds
from planner.types.plan_io import configuration_from_dict
from strategies.launch.attempt import AttemptEnded, Event, OutputLine, PlanMade, RunIsBack, StepDone

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from strategies.launch.failure_causes import Ending

_REFUSAL = "error: "
"""What a rank's refusal begins with, which the rank also leaves for the supervisor."""
# A pipe gets a line for the first step and then at most one in this many seconds.
_LINE_SECONDS = 5.0
_COUNTS_ANEW = "trains again; dsplan keeps no checkpoint of this script, so steps are counted from the attempt's begin"
_CURVE_STEPS = 500
"""Steps that the curves under the live line go back."""


class RunView:
    """Draws the events of a run: a live line on a terminal, plain lines in a pipe. Use as a context manager.

    Rank 0's stdout goes to `out`, everything else to stderr; `ranks` multiplies rank 0's tokens into those of the run.
    """

    def __init__(self, *, ranks: int, out: TextIO) -> None:
        self._ranks = ranks
        self._out = out
        self._live: Live | None = None
        self._last_line = float("-inf")
        self._refusals: list[OutputLine] = []
        self._losses: deque[float | None] = deque(maxlen=_CURVE_STEPS)
        self._rates: deque[float | None] = deque(maxlen=_CURVE_STEPS)

    def __enter__(self) -> RunView:
        if can_redraw(self._out):
            from rich.live import Live

            self._live = Live(console=terminal(self._out), refresh_per_second=8, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show_refusals()
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)

    def show(self, event: Event) -> None:
        """Draw one event. What ends the run is left to the command's last line."""
        if isinstance(event, OutputLine) and event.stream == "stderr" and event.text.startswith(_REFUSAL):
            self._refusals.append(event)
            return
        if isinstance(event, AttemptEnded):
            reason = event.ending.reason
            self._refusals = [line for line in self._refusals if line.text.removeprefix(_REFUSAL) != reason]
            if is_last_word(event.ending) and event.decision.action == "give_up":
                return
        self._show_refusals()
        if isinstance(event, OutputLine):
            self._show_output(event)
        elif isinstance(event, StepDone):
            self._show_step(event)
        elif isinstance(event, PlanMade):
            self._ranks = int(event.plan["plan"].get("world_size") or self._ranks)
            self._line(printable(f"plan: {plan_line(event)}"))
        elif isinstance(event, AttemptEnded):
            self._line(printable(ending_line(event)), stderr=True)
        elif isinstance(event, RunIsBack):
            lost = "" if event.seconds_lost is None else f"; {format_seconds(event.seconds_lost)} lost"
            back = _COUNTS_ANEW if event.counts_anew else f"back at step {event.step}{lost}"
            self._line(label_lines(back), stderr=True)
        else:
            self._line(label_lines(event.line()), stderr=True)

    def _show_refusals(self) -> None:
        refusals, self._refusals = self._refusals, []
        for line in refusals:
            self._show_output(line)

    def _show_output(self, line: OutputLine) -> None:
        text = line.text if line.rank == 0 else f"[rank {line.rank}] {line.text}"
        self._line(text, stderr=line.stream == "stderr")

    def _show_step(self, step: StepDone) -> None:
        if self._live is not None:
            from rich.text import Text as RichText

            text = step_line(step, self._ranks, self._live.console.width)
            self._losses.append(step.loss)
            self._rates.append((step.tokens or step.samples) / step.seconds if step.seconds > 0 else None)
            self._live.update(RichText("\n".join([text, *self._curves(self._live.console)]), style="bold cyan"))
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self._line(step_line(step, self._ranks))

    def _curves(self, console: Console) -> list[str]:
        """Loss and speed of the last steps in one line; nothing before there are some."""
        if len(self._losses) < 3:
            return []
        unicode, width = takes_blocks(console), max(4, console.width // 2 - 8)
        named = (("loss", self._losses), ("speed", self._rates))
        drawn = ((name, sparkline(tuple(values), width, unicode=unicode)) for name, values in named)
        return ["  ".join(f"{name} {line}" for name, line in drawn if line)]

    def _line(self, text: str, *, stderr: bool = False) -> None:
        if self._live is not None:
            from rich.text import Text as RichText

            self._live.console.print(RichText.from_ansi(text))
        else:
            print(text, file=sys.stderr if stderr else self._out, flush=True)


def step_line(step: StepDone, ranks: int, width: int | None = None) -> str:
    """One step in one line: number, loss, tokens per second over all ranks, memory of rank 0.

    In a line of so many characters what matters least is left out.
    """
    parts = [f"step {step.step}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    parts.append(f"{format_seconds(step.seconds)}/step")
    if (units := step.tokens or step.samples) and step.seconds > 0:
        counted = "samples" if units == step.samples else "tokens"
        parts.append(f"{format_count(units * ranks / step.seconds)} {counted}/s")
    if step.peak_bytes:
        parts.append(f"peak {format_bytes(step.peak_bytes)}")
    while width is not None and len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def plan_line(event: PlanMade) -> str:
    """Return a plan in one line."""
    plan, memory, seconds = event.plan["plan"], event.plan["memory"], event.plan["time"]["step_seconds"]
    chosen = configuration_from_dict(plan)
    return (
        f"{plan['strategy']} ({plan['backend']}){chosen.degrees_text}, micro-batch {chosen.micro_batch_text} x"
        f" accumulation {plan['gradient_accumulation_steps']}, {plan['precision']},"
        f" checkpointing {plan['activation_checkpointing']}, offload {plan['offload']};"
        f" predicted {format_bytes(memory['peak_allocated_bytes'])} per rank,"
        f" {format_seconds(seconds)} per step"
    )


def ending_line(ended: AttemptEnded) -> str:
    """Return the end of an attempt in one line: where, at which step, why, and what follows."""
    ending, decision = ended.ending, ended.decision
    step = "" if ending.step is None else f"step {ending.step}"
    where = ", ".join(part for part in (ending_place(ending), step) if part)
    pause = f" in {format_seconds(decision.delay_seconds)}" if decision.delay_seconds else ""
    return label_lines(f"{where}{': ' if where else ''}{ending_words(ending)}; {decision.why}{pause}")


def is_last_word(ending: Ending) -> bool:
    """Return whether an ending is a refusal whose one line says all there is to say."""
    return ending.kind == "refused" and bool(ending.reason)


def ending_words(ending: Ending) -> str:
    """Return what it was and why, each said once."""
    what = ending.kind.replace("_", " ")
    if what in ending.reason.lower():
        return ending.reason
    return f"{what}: {ending.reason}" if ending.reason else what


def ending_place(ending: Ending) -> str:
    """Return the rank and its host; empty where no rank was at fault."""
    if ending.rank is None:
        return ending.host
    return f"rank {ending.rank}" + (f" ({ending.host})" if ending.host else "")
