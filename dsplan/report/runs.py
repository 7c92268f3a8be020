"""Pictures of runs: predicted beside measured, one run over time, and several runs beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape, unescape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dsplan.render.run_report import report_blocks
from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Table, columns
from dsplan.report.picture import COLOURS, LIMIT, QUIET, Picture, label, line_style, thin_out, to_plotly
from dsplan.report.run_data import Attempt, Happening, Point, RunData
from hardware_db.records import dataclass
from hardware_db.units import format_bytes, format_count, format_ratio, format_seconds

_MISSING = "-"
_TABLE_ROWS = 60
_MARKS = 60
"""Lines through a picture; the strip below it has the rest."""
_FEW = 30
"""Points of a line that are marked each."""


def run_pictures(run: RunData) -> tuple[Picture, ...]:
    """One run: predicted beside measured, then everything that happened on one axis of time; what there is of it."""
    beside = predicted_and_measured([run])
    return tuple(picture for picture in (beside, course(run)) if picture is not None)


def runs_pictures(runs: Sequence[RunData]) -> tuple[Picture, ...]:
    """Several runs beside each other; those of one run where there is one."""
    if len(runs) == 1:
        return run_pictures(runs[0])
    pictures = [predicted_and_measured(runs), compare_runs(runs)]
    pictures += [course(run, name=f"course-{number}") for number, run in enumerate(runs, start=1)]
    return tuple(picture for picture in pictures if picture is not None)


def run_blocks(run: RunData) -> list[Block]:
    """Return what `report.md` of the run directory says; of a run that is not over, what can be said by now."""
    blocks = report_blocks(run.report)
    if run.is_running or not run.is_ended:
        blocks[0] = Text(text=f"{run.outcome}: {run.measured.steps} steps so far", style="warning")
    return blocks


def titles(runs: Sequence[RunData]) -> list[str]:
    """Return what the pictures call the runs: their directories, numbered where two are called the same."""
    names = [label(run.name) for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


# Predicted beside measured.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """One figure of every run."""

    title: str
    spell: Callable[[float], str]
    predicted: Callable[[RunData], float | None]
    measured: Callable[[RunData], float | None]
    predicted_between: Callable[[RunData], tuple[float, float] | None] = lambda run: None
    measured_between: Callable[[RunData], tuple[float, float] | None] = lambda run: None


def _figures(runs: Sequence[RunData]) -> list[_Figure]:
    """Those that any of the runs measured."""
    kinds = {run.counted for run in runs}
    counted = kinds.pop() if len(kinds) == 1 else "samples or tokens"
    figures = [
        _Figure(
            title="time of a step",
            spell=format_seconds,
            predicted=lambda run: run.plan.time.step_seconds if run.plan else None,
            measured=lambda run: run.measured.step_seconds,
            predicted_between=lambda run: _between(
                *((run.plan.time.step_seconds_low, run.plan.time.step_seconds_high) if run.plan else (None, None))
            ),
            measured_between=lambda run: _between(run.measured.step_seconds_low, run.measured.step_seconds_high),
        ),
        _Figure(
            title=f"{counted} per second, all ranks",
            spell=format_count,
            predicted=lambda run: run.report.predicted_units_per_second,
            measured=lambda run: run.report.units_per_second,
        ),
        _Figure(
            title="peak memory of a rank",
            spell=format_bytes,
            predicted=lambda run: run.plan.memory.peak_allocated_bytes if run.plan else None,
            measured=lambda run: run.measured.peak_allocated_bytes,
        ),
    ]
    return [figure for figure in figures if any(figure.measured(run) is not None for run in runs)]


def _between(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


def predicted_and_measured(runs: Sequence[RunData]) -> Picture | None:
    """Bars of what was predicted and what was measured, with the intervals of nine in ten.

    None where no run measured anything.
    """
    shown = _figures(runs)
    if not shown:
        return None
    several = len(runs) > 1
    measured = [(run, name) for run, name in zip(runs, titles(runs), strict=True) if any(_all(shown, run))]
    left_out = [name for name in titles(runs) if name not in {kept for _, kept in measured}]
    runs, names = [run for run, _ in measured], [name for _, name in measured]
    # One run has its figure's name above the bars, several have their own there. In pixels:
    each, gap, top = (84, 52, 80) if several else (62, 20, 56)
    height = len(shown) * each * len(runs) + gap * (len(shown) - 1)
    figure = make_subplots(
        rows=len(shown),
        cols=1,
        vertical_spacing=gap / height,
        subplot_titles=[item.title if several else "" for item in shown],
    )
    figure.update_annotations(x=0, xanchor="left", yshift=22, font={"size": 14})
    for row, item in enumerate(shown, start=1):
        for kind in ("measured", "predicted"):
            figure.add_trace(_bars(item, runs, names, kind, legend=row == 1), row=row, col=1)
        for run, name in zip(runs, names, strict=True):
            figure.add_annotation(
                x=0, y=name, showarrow=False, xanchor="left", align="left",
                text=_above(item, run, f"{_end(name)}<br>" if several else f"{item.title}: "),
                yanchor="bottom", yshift=each / 4, font={"size": 12}, row=row, col=1,
            )  # fmt: skip
        figure.update_xaxes(rangemode="tozero", visible=False, fixedrange=True, row=row, col=1)
    # The words are above the bars: beside them there is no room on a phone.
    figure.update_yaxes(autorange="reversed", fixedrange=True, visible=False)
    figure.update_layout(
        barmode="group",
        bargap=0.5,
        height=height + top + 10,
        margin={"l": 10, "r": 10, "t": top, "b": 10},
        legend={"orientation": "h", "y": 1, "yanchor": "top", "yref": "container", "x": 0, "itemclick": False},
    )
    return Picture(
        name="predicted-measured",
        title="Predicted beside measured",
        caption=(
            "Lines on the bars: between which nine of ten runs were predicted to be, and nine of ten steps were."
            " Memory is what torch allocated at the peak."
            + (f" Nothing was measured of {', '.join(left_out)}." if left_out else "")
        ),
        figure=to_plotly(figure),
        table=_beside_table(shown, runs),
    )


def _all(shown: Sequence[_Figure], run: RunData) -> list[bool]:
    return [item.measured(run) is not None for item in shown]


def _bars(item: _Figure, runs: Sequence[RunData], names: Sequence[str], kind: str, *, legend: bool) -> go.Bar:
    value, between = (
        (item.predicted, item.predicted_between) if kind == "predicted" else (item.measured, item.measured_between)
    )
    values = [value(run) for run in runs]
    bounds = [between(run) for run in runs]
    to_plotly = [
        (figure, bound) if figure is not None and bound is not None else None
        for figure, bound in zip(values, bounds, strict=True)
    ]
    words = [_MISSING if figure is None else item.spell(figure) for figure in values]
    return go.Bar(
        x=values,
        y=list(names),
        orientation="h",
        name=kind,
        legendgroup=kind,
        showlegend=legend,
        marker={
            "color": COLOURS[0] if kind == "measured" else QUIET,
            "pattern": {"shape": "" if kind == "measured" else "/", "solidity": 0.15, "fillmode": "overlay"},
        },
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [0 if pair is None else max(0.0, pair[1][1] - pair[0]) for pair in to_plotly],
            "arrayminus": [0 if pair is None else max(0.0, pair[0] - pair[1][0]) for pair in to_plotly],
            "visible": any(to_plotly),
            "thickness": 1.5,
        },
        hoverinfo="text",
        hovertext=[f"{name}: {kind} {word}" for name, word in zip(names, words, strict=True)],
    )


_PHONE_LETTERS = 34


def _end(name: str) -> str:
    """Return what a phone has room for of a name: its end, by which those of one script are told apart."""
    letters = unescape(name)
    return name if len(letters) <= _PHONE_LETTERS else f"…{escape(letters[1 - _PHONE_LETTERS :], quote=False)}"


def _above(item: _Figure, run: RunData, name: str) -> str:
    """Two short lines for one of several runs: on a phone a long one is cut."""
    predicted, measured = (
        _MISSING if value is None else item.spell(value) for value in (item.predicted(run), item.measured(run))
    )
    return f"{name}{measured}, predicted {predicted}"


def _beside_table(shown: Sequence[_Figure], runs: Sequence[RunData]) -> Table:
    rows = []
    for item in shown:
        for run in runs:
            predicted, measured = item.predicted(run), item.measured(run)
            rows.append(
                [
                    item.title,
                    run.name,
                    _cell(item, predicted, item.predicted_between(run)),
                    _cell(item, measured, item.measured_between(run)),
                    format_ratio(measured / predicted) if measured and predicted else _MISSING,
                ]
            )
    return Table(columns=columns("figure", "run", ">predicted", ">measured", ">ratio"), rows=rows)


def _cell(item: _Figure, value: float | None, between: tuple[float, float] | None) -> str:
    if value is None:
        return _MISSING
    interval = "" if between is None else f" ({item.spell(between[0])} to {item.spell(between[1])})"
    return f"{item.spell(value)}{interval}"


# One run over time.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    """A line over the points of a run; `predicted` is what it was to be, and `limit` what it must not be."""

    title: str
    name: str
    value: Callable[[Point], float | None]
    predicted: float | None = None
    limit: float | None = None
    spell: Callable[[float], str]
    suffix: str = ""


_GIB = 2**30


def _series(run: RunData) -> list[_Series]:
    """Return the lines that a run has anything to say of."""
    plan = run.plan
    on_gpu = plan is not None and plan.cluster.get("device") != "cpu"
    capacity = plan.cluster.get("capacity_bytes") if plan is not None and on_gpu else None
    series = [
        _Series(title="loss", name="loss", value=lambda point: point.loss, spell=lambda loss: f"{loss:.4f}"),
        _Series(
            title=f"{run.counted}/s",
            name=f"{run.counted} per second, all ranks",
            value=lambda point: point.units_per_second,
            predicted=run.report.predicted_units_per_second,
            spell=format_count,
        ),
        _Series(
            title="GiB of a rank",
            name="peak of torch's allocator",
            value=lambda point: _gib(point.peak_bytes),
            predicted=_gib(plan.memory.peak_allocated_bytes) if plan else None,
            limit=_gib(capacity) if isinstance(capacity, int) else None,
            spell=lambda gib: format_bytes(gib * _GIB),
        ),
        _Series(
            title="GiB on the host",
            name="memory of the process",
            value=lambda point: _gib(point.rss_bytes),
            spell=lambda gib: format_bytes(gib * _GIB),
        ),
    ]
    points = list(run.points)
    series = [item for item in series if any(item.value(point) is not None for point in points)]
    # Host memory says something of a run on a processor, or of one that measured no other.
    return [item for item in series if item is not series[-1] or len(series) < 4 or not on_gpu]


def _gib(count: float | None) -> float | None:
    return None if count is None else count / _GIB


_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0), ("days", 86400.0))


def _unit(seconds: float) -> tuple[str, float]:
    return [unit for unit in _UNITS if unit[1] == 1.0 or seconds >= 3 * unit[1]][-1]


def course(run: RunData, *, name: str = "course") -> Picture | None:
    """Draw loss, throughput and memory of a run over the time since it began.

    Below them lies a strip with its attempts, checkpoints, alerts and endings. None where no step was done and nothing
    else happened.
    """
    series = _series(run)
    if not series and not run.happenings:
        return None
    unit, length = _unit(run.seconds)
    strip = 0.16 if series else 1.0
    heights = [(1 - strip) / len(series)] * len(series) + [strip] if series else [1.0]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.035)
    for row, item in enumerate(series, start=1):
        _draw_series(figure, item, run, row, length)
    _draw_strip(figure, run, len(heights), length)
    # The axes below show the same time; the marks reach through all of them.
    for happening in [item for item in run.happenings if item.kind != "checkpoint"][:_MARKS]:
        figure.add_shape(
            type="line", xref="x", yref="paper", x0=happening.at / length, x1=happening.at / length, y0=0, y1=1,
            line={"color": LIMIT, "width": 1, "dash": "dot" if happening.is_alert else "solid"}, opacity=0.6,
        )  # fmt: skip
    figure.update_xaxes(title_text=f"{unit} since the run began", row=len(heights), col=1)
    figure.update_layout(
        height=170 * len(series) + 150,
        margin={"l": 10, "r": 10, "t": 30, "b": 50},
        showlegend=False,
        hovermode="closest",
    )
    return Picture(
        name=name,
        title=f"{label(run.name)} over time",
        caption=_course_caption(run, series),
        figure=to_plotly(figure),
        table=_course_table(run, series, unit, length),
    )


def _draw_series(figure: go.Figure, item: _Series, run: RunData, row: int, length: float) -> None:
    at: list[float | None] = []
    values: list[float | None] = []
    words: list[str] = []
    for attempt in run.attempts:
        for point in attempt.points:
            value = item.value(point)
            at.append(point.at / length)
            values.append(value)
            words.append("" if value is None else f"step {point.step}: {item.name} {item.spell(value)}")
        at.append(None)  # between attempts there is no line
        values.append(None)
        words.append("")
    few = sum(value is not None for value in values) <= _FEW
    figure.add_trace(
        go.Scatter(
            x=at, y=values, mode="lines+markers" if few else "lines", name=item.name, hoverinfo="text", hovertext=words,
            line={"color": COLOURS[(row - 1) % len(COLOURS)], "width": 1.6}, marker={"size": 5},
        ),
        row=row, col=1,
    )  # fmt: skip
    figure.update_yaxes(
        title_text=item.title, automargin=True, rangemode="normal" if item.name == "loss" else "tozero", row=row, col=1
    )
    end = run.seconds / length
    labels = []
    for value, what, dash in ((item.predicted, "predicted", "dash"), (item.limit, "the card has", "dot")):
        if value is not None:
            labels.append(f"{what} {item.spell(value)}")
            figure.add_trace(
                go.Scatter(
                    x=[0, end], y=[value, value], mode="lines", name=what, hoverinfo="text", hovertext=[labels[-1]] * 2,
                    line={"color": QUIET if what == "predicted" else LIMIT, "dash": dash, "width": 1.4},
                ),
                row=row, col=1,
            )  # fmt: skip
    if labels:
        # Above the lines of the run, which would be behind the words.
        figure.add_annotation(
            x=1, y=1, xref="x domain", yref="y domain", text=", ".join(labels), showarrow=False, xanchor="right",
            yanchor="bottom", font={"size": 11}, row=row, col=1,
        )  # fmt: skip


_STRIPS = ("attempts", "checkpoints", "alerts", "endings")


def _draw_strip(figure: go.Figure, run: RunData, row: int, length: float) -> None:
    attempts = run.attempts
    figure.add_trace(
        go.Bar(
            base=[attempt.began / length for attempt in attempts],
            x=[(attempt.ended - attempt.began) / length for attempt in attempts],
            y=[_STRIPS[0]] * len(attempts),
            orientation="h",
            width=0.7,
            name="attempts",
            marker={
                "color": [COLOURS[0] if attempt.report.ending is None else QUIET for attempt in attempts],
                "line": {"width": 1},
            },
            hoverinfo="text",
            hovertext=[_attempt_words(attempt) for attempt in attempts],
        ),
        row=row, col=1,
    )  # fmt: skip
    groups: tuple[tuple[str, str, Callable[[Happening], bool]], ...] = (
        (_STRIPS[1], "diamond", lambda item: item.kind == "checkpoint"),
        (_STRIPS[2], "triangle-up", lambda item: item.is_alert),
        (_STRIPS[3], "x", lambda item: item.kind == "ending"),
    )
    for strip, symbol, belongs in groups:
        marks = [item for item in run.happenings if belongs(item)]
        if marks:
            figure.add_trace(
                go.Scatter(
                    x=[item.at / length for item in marks], y=[strip] * len(marks), mode="markers", name=strip,
                    marker={"symbol": symbol, "size": 10, "color": COLOURS[2] if strip == "checkpoints" else LIMIT},
                    hoverinfo="text", hovertext=[label(item.text) for item in marks],
                ),
                row=row, col=1,
            )  # fmt: skip
    figure.update_yaxes(autorange="reversed", fixedrange=True, automargin=True, row=row, col=1)


def _attempt_words(attempt: Attempt) -> str:
    report = attempt.report
    ranks = f"{report.ranks} rank{'s' if report.ranks != 1 else ''}"
    steps = "no step" if not attempt.points else f"steps {attempt.points[0].step} to {attempt.points[-1].step}"
    return f"attempt {report.attempt}: {ranks}, {steps}, {format_seconds(attempt.ended - attempt.began)}"


def _course_caption(run: RunData, series: Sequence[_Series]) -> str:
    points = list(run.points)
    kinds = {"checkpoint": 0, "alert": 0, "ending": 0}
    for happening in run.happenings:
        kinds["alert" if happening.is_alert else happening.kind] += 1
    restarts = max(0, len(run.attempts) - 1)
    counts = [
        _counted(len(points), "point"), _counted(restarts, "restart"),
        _counted(kinds["checkpoint"], "checkpoint"), _counted(kinds["alert"], "alert"),
    ]  # fmt: skip
    lines = [f"{', '.join(counts)} in {format_seconds(run.seconds)}."]
    if kinds["alert"] or kinds["ending"]:
        lines.append("Lines from top to bottom are alerts (dotted) and endings.")
    if points and points[-1].step > len(points):
        lines.append("Of so many steps several are one point: the median of their times, the most of their memory.")
    if any(item.predicted is not None for item in series):
        lines.append("Dashed lines are predictions.")
    return " ".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _course_table(run: RunData, series: Sequence[_Series], unit: str, length: float) -> Table:
    """Points and happenings in the order of time."""
    points = list(run.points)
    every: list[tuple[float, list[str]]] = [
        (
            points[index].at,
            [
                str(points[index].step),
                *(_spelt(item, item.value(points[index])) for item in series),
                "",
            ],
        )
        for index in thin_out(len(points), _TABLE_ROWS)
    ]
    for happening in _shown_happenings(run.happenings):
        step = _MISSING if happening.step is None else str(happening.step)
        every.append((happening.at, [step, *("" for _ in series), happening.text]))
    rows = [[f"{at / length:.4g}", *cells] for at, cells in sorted(every, key=lambda row: row[0])]
    heading = columns(f">{unit}", ">step", *(f">{item.name}" for item in series), "what happened")
    return Table(columns=heading, rows=rows)


def _shown_happenings(happenings: Sequence[Happening]) -> Iterable[Happening]:
    return (happenings[index] for index in thin_out(len(happenings), _TABLE_ROWS))


def _spelt(item: _Series, value: float | None) -> str:
    return _MISSING if value is None else item.spell(value)


# Several runs.


_COUNTED = "counted"
"""Tokens or samples, as the runs do."""
_COMPARED: tuple[_Series, ...] = (
    _Series(title="loss", name="loss", value=lambda point: point.loss, spell=lambda loss: f"{loss:.4f}"),
    _Series(
        title=f"{_COUNTED}/s",
        name="tokens or samples per second, all ranks",
        value=lambda point: point.units_per_second,
        spell=format_count,
    ),
    _Series(
        title="GiB of a rank",
        name="peak of torch's allocator",
        value=lambda point: _gib(point.peak_bytes),
        spell=lambda gib: format_bytes(gib * _GIB),
    ),
)


def compare_runs(runs: Sequence[RunData]) -> Picture | None:
    """Loss, throughput and memory of several runs by step; None where none did a step."""
    lines = [_last_of_each_step(run) for run in runs]
    kinds = [item for item in _COMPARED if any(item.value(point) is not None for line in lines for point in line)]
    if not kinds:
        return None
    figure = make_subplots(rows=len(kinds), cols=1, shared_xaxes=True, vertical_spacing=0.05)
    names, counted = titles(runs), {run.counted for run in runs if any(run.points)}
    for row, item in enumerate(kinds, start=1):
        for index, (name, line) in enumerate(zip(names, lines, strict=True)):
            figure.add_trace(_draw_compared(item, _end(name), line, index, legend=row == 1), row=row, col=1)
        range_mode = "normal" if item.name == "loss" else "tozero"
        title = item.title.replace(_COUNTED, " or ".join(sorted(counted)))
        figure.update_yaxes(title_text=title, automargin=True, rangemode=range_mode, row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(kinds), col=1)
    figure.update_layout(
        height=190 * len(kinds) + 90 + 22 * len(runs),
        margin={"l": 10, "r": 10, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    )
    return Picture(
        name="runs",
        title="Runs compared",
        caption="By step, not by time: of a step that was run again after a restart, the last time counts.",
        figure=to_plotly(figure),
        table=_runs_table(runs),
    )


def _draw_compared(item: _Series, name: str, line: Sequence[Point], index: int, *, legend: bool) -> go.Scatter:
    points = [(point.step, value) for point in line if (value := item.value(point)) is not None]
    return go.Scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        name=name,
        mode="lines+markers" if len(points) <= _FEW else "lines",
        legendgroup=str(index),
        showlegend=legend,
        line={**line_style(index), "width": 1.6},
        marker={"size": 5},
        hoverinfo="text",
        hovertext=[f"{name}, step {step}: {item.name} {item.spell(value)}" for step, value in points],
    )


def _last_of_each_step(run: RunData) -> list[Point]:
    """Return the points of the final lineage: what a restart undid is left out."""
    line: list[Point] = []
    for attempt in run.attempts:
        if attempt.points:
            line = [point for point in line if point.step < attempt.points[0].step]
            line.extend(attempt.points)
    return line


def _runs_table(runs: Sequence[RunData]) -> Table:
    rows = [
        [
            run.name,
            str(run.plan.model.get("name")) if run.plan else _MISSING,
            _configuration(run),
            run.outcome,
            str(len(run.attempts)),
            str(run.measured.steps),
            _MISSING if run.measured.last_loss is None else f"{run.measured.last_loss:.4f}",
            *(_MISSING if value is None else spell(value) for value, spell in _rates(run)),
        ]
        for run in runs
    ]
    heading = columns(
        "run", "model", "?plan", "outcome", ">attempts", ">steps", ">last loss", ">step", ">per second", ">peak memory"
    )
    return Table(columns=heading, rows=rows)


def _rates(run: RunData) -> tuple[tuple[float | None, Callable[[float], str]], ...]:
    measured = run.measured
    return (
        (measured.step_seconds, format_seconds),
        (run.report.units_per_second, format_count),
        (measured.peak_allocated_bytes, format_bytes),
    )


def _configuration(run: RunData) -> str:
    if run.plan is None:
        return "unplanned"
    chosen = run.plan.configuration
    ranks = f"{chosen.world_size} rank{'' if chosen.world_size == 1 else 's'}"
    accumulation = chosen.gradient_accumulation_steps
    return f"{chosen.strategy}, {ranks}, micro-batch {chosen.micro_batch_size} x {accumulation}"
