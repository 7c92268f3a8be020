"""A checked config as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dsplan.render.html import blocks_html, plain
from dsplan.render.plan_view import (
    VERDICT_STYLES,
    describe,
    figure_blocks,
    header,
    shown_rate,
    shown_unit,
    verdict_line,
)
from dsplan.render.show import Block, Style, Text
from dsplan.render.table_columns import Table, columns
from hardware_db.units import format_bytes, format_seconds
from planner.types.plan import Plan

if TYPE_CHECKING:
    from dsplan.checking import Checked
    from planner.read.form import Finding, Reading, Understood, Unread
    from planner.search.audit import Better

SCHEMA_VERSION = 1
_STYLES: Mapping[str, Style] = {"error": "bad", "warning": "warning", "info": "faint"}


def check_blocks(checked: Checked) -> list[Block]:
    """Return what was read and what was not, the estimate, findings worst first, and the better plan."""
    reading, outcome = checked.reading, checked.audit
    heading = Text(text=f"{reading.trainer}: {', '.join(reading.files)}", style="heading")
    estimate = [Text(text=""), *estimate_blocks(checked)]
    return [
        *(heading, *reading_blocks(reading), *estimate),
        *finding_blocks(outcome.findings),
        *better_blocks(outcome.better, outcome.plan),
    ]


def check_title(checked: Checked) -> str:
    """Return the verdict on a config in a line."""
    return f"{', '.join(checked.reading.files)}: {checked.verdict}"


def check_html(checked: Checked) -> str:
    """Return the verdict, the findings, the better plan with its change of the files, and what was read, as HTML."""
    outcome, reading = checked.audit, checked.reading
    seen = [*estimate_blocks(checked), *finding_blocks(outcome.findings)]
    read = f"<details><summary>What was read of it</summary>{blocks_html(reading_blocks(reading))}</details>"
    return (
        f"<section><h2>{plain(check_title(checked))}</h2>{blocks_html(seen)}"
        f"{better_html(outcome.better, outcome.plan)}{read}</section>"
    )


def better_html(better: Better | None, now: Plan | None) -> str:
    """Return the better plan and the diff of the files that it takes, as HTML; empty where there is none."""
    diff = ""
    if better is not None and better.texts:
        text = plain(better.diff, most=None)
        diff = f'<pre tabindex="0" role="region" aria-label="The change as a diff">{text}</pre>'
    return blocks_html(better_blocks(better, now, with_diff=True)) + diff


def estimate_blocks(checked: Checked) -> list[Block]:
    """Return the estimate of what files say, with the length of the run, or why there is none."""
    outcome = checked.audit
    if outcome.plan is None:
        return [Text(text=f"no estimate: {outcome.why}", style="bad")]
    taken = outcome.request.defaults if outcome.request is not None else ()
    run = _run_length(outcome.plan, checked.reading.steps)
    return [*header(outcome.plan, taken), *figure_blocks(outcome.plan), *run]


def reading_blocks(reading: Reading) -> list[Block]:
    """Return what was read and what was not."""
    return [*_read_table(reading.read), *_unread_blocks(reading.unread)]


def _at(file: str, line: int, several: bool) -> str:
    return f"{file}:{line}" if several else str(line)


def _read_table(read: Sequence[Understood]) -> list[Block]:
    if not read:
        return []
    several = len({item.file for item in read}) > 1
    rows = [[item.key, _at(item.file, item.line, several), item.field, _value(item.value)] for item in read]
    names = columns("key", "line" if several else ">line", "became", "value")
    return [Table(title="what was read", columns=names, rows=rows)]


def _value(value: object) -> str:
    text = "yes" if value is True else "no" if value is False else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _unread_blocks(unread: Sequence[Unread]) -> list[Block]:
    gaps = [item for item in unread if item.matters]
    several = len({item.file for item in unread}) > 1
    blocks: list[Block] = []
    if gaps:
        rows = [[item.key, _at(item.file, item.line, several), item.reason] for item in gaps]
        names = columns("key", "line" if several else ">line", "why")
        blocks.append(Table(title="not counted, and may matter", columns=names, rows=rows))
    rest = sorted({item.key for item in unread if not item.matters})
    if rest:
        blocks.append(Text(text=f"without effect on memory and time: {', '.join(rest)}", style="faint"))
    return blocks


def _run_length(plan: Plan, steps: int | None) -> list[Block]:
    if steps is None:
        return []
    seconds = steps * plan.time.step_seconds
    return [Text(text=f"the run: {steps:,} steps, {format_seconds(seconds)} without evaluation and saving")]


def finding_blocks(findings: Sequence[Finding]) -> list[Block]:
    """Return findings, worst first, with their places."""
    if not findings:
        return [Text(text=""), Text(text="no findings", style="good")]
    blocks: list[Block] = [Text(text=""), Text(text="findings", style="heading")]
    for finding in findings:
        where = f" ({finding.file}:{finding.line})" if finding.file and finding.line else ""
        blocks.append(Text(text=f"{finding.severity}: {finding.message}{where}", style=_STYLES[finding.severity]))
    return blocks


def better_blocks(better: Better | None, now: Plan | None, *, with_diff: bool = False) -> list[Block]:
    """Return the plan that the same trainer can run, and what it is better in; `with_diff` where its diff follows."""
    if better is None or now is None:
        return []
    plan = better.plan
    heading = "the same trainer can run this, which fits"
    if better.gain is not None:
        heading = f"the same trainer can run this, which is predicted {better.gain:.0%} faster"
    elif plan.configuration == now.configuration:
        heading = "the same trainer can run this, where what it refuses is put right"
    elif now.verdict == "tight":
        heading += " with room"
    rate = f"{shown_rate(plan):,.0f} {shown_unit(plan)}/s per GPU"
    used = format_bytes(plan.memory.device_needed_bytes or plan.memory.device_used_upper_bytes)
    blocks: list[Block] = [
        Text(text=""),
        Text(text=heading, style="heading"),
        Text(text=describe(plan.configuration)),
        Text(
            text=f"{format_seconds(plan.time.step_seconds)} a step, {rate}, {used} per GPU; {verdict_line(plan)}",
            style=VERDICT_STYLES[plan.verdict],
        ),
    ]
    diff = "as a change of the file:" if with_diff else "--fix prints it as a diff of the file"
    hint = diff if better.texts else "the file has no single key for it"
    left = [Text(text=f"an error that stays: {finding.message}", style="bad") for finding in better.left]
    return [*blocks, *left, Text(text=hint, style="faint")]


def check_to_dict(checked: Checked) -> dict[str, Any]:
    """Return what `check --json` prints."""
    from planner.types.plan_io import plan_to_dict

    reading, outcome = checked.reading, checked.audit
    better = outcome.better
    best = None
    if better is not None:
        best = {"plan": plan_to_dict(better.plan), "gain": better.gain, "diff": better.diff}
    answer: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "format": reading.format,
        "files": list(reading.files),
        "read": [{**asdict(item), "value": _plain(item.value)} for item in reading.read],
        "unread": [asdict(item) for item in reading.unread],
        "question": {name: _plain(value) for name, value in checked.question.items()},
        "estimate": None if outcome.plan is None else plan_to_dict(outcome.plan),
        "findings": [asdict(item) for item in outcome.findings],
        "best": best,
        "steps": reading.steps,
    }
    if outcome.plan is None:
        answer["why"] = outcome.why
    return answer


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


# A folder of configs as a table.


def folder_blocks(rows: Sequence[tuple[str, Checked | str]]) -> list[Block]:
    """Return a line for each file: its verdict with memory and time, or why there is none."""
    names = columns("file", "?trainer", "verdict", ">needs", ">step", "??gaps", "?worst finding")
    cells = [_folder_row(path, outcome) for path, outcome in rows]
    fitting = sum(not isinstance(outcome, str) and outcome.status == 0 for _, outcome in rows)
    failing = sum(not isinstance(outcome, str) and outcome.status == 1 for _, outcome in rows)
    total = f"{len(rows)} files: {fitting} fit, {failing} do not, {len(rows) - fitting - failing} without an estimate"
    return [Table(title="", columns=names, rows=cells), Text(text=total)]


def _folder_row(path: str, outcome: Checked | str) -> list[str]:
    if isinstance(outcome, str):
        return [path, "-", "not read", "-", "-", "-", outcome]
    plan = outcome.audit.plan
    worst = next(iter(outcome.audit.findings), None)
    message = "" if worst is None or worst.severity == "info" else worst.message
    gaps = str(len(outcome.reading.gaps))
    if plan is None:
        return [path, outcome.reading.trainer, "no estimate", "-", "-", gaps, message]
    need = plan.memory.device_needed_bytes or plan.memory.device_used_upper_bytes
    figures = [outcome.verdict, format_bytes(need), format_seconds(plan.time.step_seconds)]
    return [path, outcome.reading.trainer, *figures, gaps, message]
