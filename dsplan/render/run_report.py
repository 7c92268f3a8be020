"""The last page of a run: what ran, what happened, predicted against measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dsplan.diagnostics.tracking.feed import tracked_by
from dsplan.render.run_view import ending_place, ending_words, is_last_word
from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Bar, Cell, Column, Table, columns
from hardware_db.files import replace_whole
from hardware_db.units import format_bytes, format_count, format_ratio, format_seconds
from planner.types.plan_io import plan_to_dict
from strategies.run_directory.claim import LEFT_TO_SCRIPT, claimed_kind, saves_itself
from strategies.run_directory.files import profiles_in

if TYPE_CHECKING:
    from dsplan.diagnostics.recorded_runs import Stored
    from planner.types.plan import Plan
    from strategies.launch.report import AttemptReport, RunReport

# Blocks as Markdown, for pages that are kept.


def markdown(blocks: Iterable[Block], *, title: str) -> str:
    """Return a page of the blocks under a heading."""
    parts = [f"# {title}", *(_table(block) if isinstance(block, Table) else block.text for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [
        _line([column.name for column in table.columns]),
        _line(["---:" if column.right else "---" for column in table.columns]),
        *(_line(row) for row in table.rows),
    ]
    return "\n".join([f"## {table.title}", "", *lines] if table.title else lines)


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return f"{cell.share:.0%}"
    return cell.replace("\\", "\\\\").replace("|", "\\|")


_MISSING = "-"
_MOST_LETTERS = 160
"""Of the words on an ending in a table (a choice); the line on it and `--json` have all of them."""


def report_blocks(report: RunReport, *, reason_follows: bool = False) -> list[Block]:
    """Return the end of a run: how it ended, its attempts, predicted beside measured, the loss, and its files.

    With `reason_follows` the one refusal of a run that never began is left to the line that follows.
    """
    measured = report.measured
    blocks: list[Block] = [_outcome_text(report)]
    if len(report.attempts) > 1:
        blocks.append(_what_ran(report))
    endings = [attempt.ending for attempt in report.attempts if attempt.ending is not None]
    if endings and not (reason_follows and len(endings) == 1 and is_last_word(endings[0])):
        blocks.append(_what_happened(report))
    if measured.steps:
        heading = (Column("per step"), Column("predicted", True), Column("measured", True), Column("ratio", True))
        blocks.append(Table(columns=heading, rows=_comparison(report), title="predicted and measured"))
    if measured.first_loss is not None and measured.last_loss is not None:
        blocks.append(Text(text=f"loss {measured.first_loss:.4f} -> {measured.last_loss:.4f}"))
    blocks.append(Text(text=f"run directory {report.spec.directory}"))
    blocks += [Text(text=line) for line in profile_lines(report.spec.directory)]
    tracked = tracked_by(report.spec.directory)
    blocks += [Text(text=f"tracked by {name}: {state.where}") for name, state in tracked.items()]
    return blocks


def profile_lines(directory: Path) -> list[str]:
    """Return where the profiles of a run are, and what opens them; none where nothing was profiled."""
    return [
        f"profile of {len(paths)} {'rank' if len(paths) == 1 else 'ranks'} for {viewer}: {paths[0].name}"
        + (f" to {paths[-1].name}" if len(paths) > 1 else "")
        for viewer, paths in profiles_in(directory).items()
    ]


def write_report(report: RunReport, stored: str) -> None:
    """Keep the page as `report.md` in the run directory; `stored` says where the database has the run."""
    from strategies.run_directory.files import REPORT_FILE

    path = report.spec.directory / REPORT_FILE
    page = markdown([*report_blocks(report), Text(text=stored)], title=f"dsplan run {Path(report.spec.script).name}")
    replace_whole(path, page)


def _outcome_text(report: RunReport) -> Text:
    outcome, steps = report.outcome, report.measured.steps
    attempts = f", {len(report.attempts)} attempts" if len(report.attempts) > 1 else ""
    if attempts and saves_itself(report.spec.directory):
        attempts = f" in the last of {len(report.attempts)} attempts"
    if outcome.name == "completed":
        return Text(text=f"completed: {steps} steps{attempts}" if steps else f"completed{attempts}", style="good")
    if outcome.name == "interrupted":
        return Text(text=f"interrupted after {steps} steps{attempts}; {_after_interruption(report)}", style="warning")
    if outcome.name == "preempted":
        return Text(text=_stop_sentence(report), style="warning")
    return Text(text=f"{outcome.name.replace('_', ' ')} after {steps} steps{attempts}", style="bad")


def _after_interruption(report: RunReport) -> str:
    from strategies.supervision.lineage import newest_first, read

    saved = newest_first(read(report.spec.directory))
    if not saved and saves_itself(report.spec.directory):
        return f"{LEFT_TO_SCRIPT}, with dsplan run --resume {report.spec.directory}"
    if not saved:
        return f"every rank was stopped, and nothing was saved; again with dsplan run --resume {report.spec.directory}"
    return f"resume from step {saved[0].step} with dsplan run --resume {report.spec.directory}"


def _stop_sentence(report: RunReport) -> str:
    """Return how a run stopped that was asked to, and how to resume."""
    ending = report.attempts[-1].ending
    if ending is not None and ending.saved:
        sentence = f"stopped at step {ending.step} and saved"
    else:
        cause = f": {ending.reason}" if ending is not None and ending.reason else ""
        sentence = f"stopped after {report.measured.steps} steps{cause}"
    return f"{sentence}; resume with dsplan run --resume {report.spec.directory}"


def _what_ran(report: RunReport) -> Table:
    rows = [
        [
            str(attempt.attempt),
            _clock(attempt.began),
            format_seconds(attempt.seconds),
            str(attempt.ranks),
            _MISSING if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}",
            _MISSING if attempt.plan is None else _plan(attempt.plan),
        ]
        for attempt in report.attempts
    ]
    heading = columns("attempt", "??began", "?>took", "?>ranks", ">steps", "plan")
    return Table(columns=heading, rows=rows, title="what ran")


def _what_happened(report: RunReport) -> Table:
    rows = [row for attempt in report.attempts if (row := _ending_row(attempt))]
    heading = columns("??when", ">step", "?where", "what", "then", "???>lost")
    return Table(columns=heading, rows=rows, title="what happened")


def _ending_row(attempt: AttemptReport) -> list[str]:
    if attempt.ending is None:
        return []
    ending = attempt.ending
    return [
        _clock(attempt.began + attempt.seconds),
        _MISSING if ending.step is None else str(ending.step),
        ending_place(ending) or _MISSING,
        words if len(words := ending_words(ending)) <= _MOST_LETTERS else f"{words[: _MOST_LETTERS - 1]}…",
        _MISSING if attempt.decision is None else attempt.decision.why,
        _MISSING if attempt.seconds_lost is None else format_seconds(attempt.seconds_lost),
    ]


def _plan(plan: Plan) -> str:
    chosen = plan.configuration
    offload = "" if chosen.offload == "none" else f", offload {chosen.offload}"
    return (
        f"{chosen.strategy}{chosen.degrees_text}, micro-batch {chosen.micro_batch_text} x"
        f" {chosen.gradient_accumulation_steps}, checkpointing {chosen.activation_checkpointing}{offload}"
    )


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _comparison(report: RunReport) -> list[list[str]]:
    measured, plan = report.measured, report.plan
    rows = (
        ("peak memory of a rank", plan.memory.peak_allocated_bytes if plan else None, measured.peak_allocated_bytes),
        ("step time", plan.time.step_seconds if plan else None, measured.step_seconds),
        (f"{report.counted}/s, all ranks", report.predicted_units_per_second, report.units_per_second),
    )
    formats: tuple[Callable[[float], str], ...] = (format_bytes, format_seconds, format_count)
    return [
        [
            name,
            _MISSING if predicted is None else spell(predicted),
            _MISSING if figure is None else spell(figure),
            format_ratio(figure / predicted) if figure and predicted else _MISSING,
        ]
        for (name, predicted, figure), spell in zip(rows, formats, strict=True)
    ]


# The object that `dsplan run --json` prints.


def report_to_dict(report: RunReport, stored: Stored) -> dict[str, object]:
    """Return the object that `dsplan run --json` prints.

    Outcome, measurements, attempts, what was seen to train, plan (null where nothing was planned) and where the run was
    stored.
    """
    outcome = report.outcome
    measured = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report.measured).items()
    }
    return {
        "schema_version": 1,
        "script": report.spec.script,
        "processes": report.spec.processes,
        "run_directory": report.spec.run_directory,
        "outcome": outcome.name,
        "exit_code": outcome.exit_code,
        "failed_rank": outcome.rank,
        "reason": outcome.reason,
        "log": None if outcome.log is None else str(outcome.log),
        "measured": measured,
        "attempts": [_attempt(attempt) for attempt in report.attempts],
        "trained_with": claimed_kind(report.spec.directory),
        "plan": None if report.plan is None else plan_to_dict(report.plan),
        "measurement_id": stored.measurement_id,
    }


def _attempt(attempt: AttemptReport) -> dict[str, object]:
    """`began` is in seconds since 1970; the plan is its `plan` section."""
    return {
        "attempt": attempt.attempt,
        "began": attempt.began,
        "seconds": attempt.seconds,
        "ranks": attempt.ranks,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "plan": None if attempt.plan is None else plan_to_dict(attempt.plan)["plan"],
        "ending": None if attempt.ending is None else attempt.ending.to_dict(),
        "decision": None if attempt.decision is None else asdict(attempt.decision),
        "seconds_lost": attempt.seconds_lost,
    }
