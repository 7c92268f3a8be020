"""Pictures of what `dsplan db calibrate` learns: step times predicted and measured, and the rates behind them."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from dsplan.render.db_view import factor_intervals, hardware_name
from dsplan.render.table_columns import Table, columns
from dsplan.report.picture import COLOURS, LIMIT, QUIET, Picture, label, to_plotly
from hardware_db.units import format_seconds
from planner.calibration.calibration import Calibration
from planner.calibration.learn import Calibrated, Check, Refreshed, checks

Interval = tuple[float, float, float]
"""Lowest, expected, highest seconds."""


def calibration_pictures(refreshed: Refreshed) -> tuple[Picture, ...]:
    """For every kind of hardware its runs beside their predictions, and the factors that were learnt, if any were."""
    pictures = []
    for number, kind in enumerate(refreshed.kinds, start=1):
        pictures.append(_predictions(kind, checks(kind), number))
        if kind.lesson.calibration is not None:
            pictures.append(_factors(kind, kind.lesson.calibration, number))
    return tuple(pictures)


# Runs beside their predictions.


def _predictions(kind: Calibrated, checks: Sequence[Check], number: int) -> Picture:
    """Predicted over measured step time by the measured one, with the interval of nine in ten."""
    is_fitted = any(check.left_out is not None for check in checks)
    groups = [("as shipped", QUIET, "square-open", [(check, check.shipped) for check in checks])]
    if is_fitted:
        learnt = [(check, check.left_out) for check in checks if check.left_out is not None]
        groups.append(("learnt from the other runs", COLOURS[0], "circle", learnt))
    figure = go.Figure()
    for name, colour, symbol, pairs in groups:
        figure.add_trace(_ratios(name, colour, symbol, pairs))
    figure.add_hline(y=1, line={"color": LIMIT, "width": 1.5, "dash": "dot"})
    figure.update_xaxes(type="log", title_text="measured seconds of a step", tickformat="~g", nticks=8)
    figure.update_yaxes(type="log", title_text="predicted / measured", tickformat=".2f", nticks=9)
    figure.update_layout(
        height=420,
        margin={"l": 10, "r": 10, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    )
    return Picture(
        name=f"predictions-{number}",
        title=f"Predictions for {label(hardware_name(kind.hardware))}",
        caption=_caption(kind, groups),
        figure=to_plotly(figure),
        table=_table(checks, is_fitted=is_fitted),
    )


def _ratios(name: str, colour: str, symbol: str, pairs: Sequence[tuple[Check, Interval]]) -> go.Scatter:
    ratios = [tuple(seconds / check.row.seconds for seconds in between) for check, between in pairs]
    return go.Scatter(
        x=[check.row.seconds for check, _ in pairs],
        y=[expected for _, expected, _ in ratios],
        mode="markers",
        name=name,
        marker={"color": colour, "symbol": symbol, "size": 8},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - expected for _, expected, high in ratios],
            "arrayminus": [expected - low for low, expected, _ in ratios],
            "color": colour,
            "thickness": 1,
            "width": 2,
        },
        hoverinfo="text",
        hovertext=[
            f"{label(check.row.model)}, {_configuration(check)}:<br>{name} {_between(between)}"
            f"<br>measured {format_seconds(check.row.seconds)}"
            for check, between in pairs
        ],
    )


def _caption(kind: Calibrated, groups: Sequence[tuple[str, str, str, Sequence[tuple[Check, Interval]]]]) -> str:
    lesson = kind.lesson
    inside = [
        f"{sum(low <= check.row.seconds <= high for check, (low, _, high) in pairs)} of {len(pairs)} {name}"
        for name, _, _, pairs in groups
    ]
    lines = [
        "Above 1 a run was faster than predicted. Bars are between what nine runs of ten should be:"
        f" the measured time lies inside for {' and '.join(inside)}."
    ]
    if lesson.error_before is not None and lesson.error_after is not None:
        lines.append(
            f"The median error is {lesson.error_before:.1%} as shipped and {lesson.error_after:.1%} after learning,"
            f" with {lesson.split}."
        )
    if lesson.reason:
        lines.append(f"Nothing is kept: {lesson.reason}.")
    return " ".join(lines)


def _table(checks: Sequence[Check], *, is_fitted: bool) -> Table:
    rows = [
        [
            check.row.model,
            _configuration(check),
            format_seconds(check.row.seconds),
            _between(check.shipped),
            *([_between(check.left_out) if check.left_out else "-"] if is_fitted else []),
        ]
        for check in checks
    ]
    learnt = [">learnt from the other runs"] if is_fitted else []
    return Table(columns=columns("model", "plan", ">measured", ">as shipped", *learnt), rows=rows)


def _configuration(check: Check) -> str:
    chosen = check.row.job.configuration
    checkpointing = "" if chosen.activation_checkpointing == "none" else ", checkpointing"
    ranks = f"{chosen.world_size} rank{'' if chosen.world_size == 1 else 's'}"
    return f"{chosen.strategy} on {ranks}, micro-batch {chosen.micro_batch_size}{checkpointing}"


def _between(interval: Interval) -> str:
    low, expected, high = interval
    return f"{format_seconds(expected)} ({format_seconds(low)} to {format_seconds(high)})"


# What was learnt.


def _factors(kind: Calibrated, calibration: Calibration, number: int) -> Picture:
    """Each factor on the shipped rates, with the interval that holds it with nine chances in ten."""
    factors = {name.replace("_", " "): values for name, values in factor_intervals(calibration).items()}
    values = list(factors.values())
    figure = go.Figure(
        go.Scatter(
            x=[value for value, _, _ in values],
            y=list(factors),
            mode="markers",
            marker={"color": COLOURS[0], "size": 9},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - value for value, _, high in values],
                "arrayminus": [value - low for value, low, _ in values],
                "color": COLOURS[0],
                "thickness": 1.5,
            },
            hoverinfo="text",
            hovertext=[f"{name} {value:.2f} ({low:.2f} to {high:.2f})" for name, (value, low, high) in factors.items()],
        )
    )
    figure.add_vline(x=1, line={"color": LIMIT, "width": 1.5, "dash": "dot"})
    figure.update_xaxes(type="log", title_text="times the shipped rate", tickformat=".2f", nticks=4)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=110 + 34 * len(factors), margin={"l": 10, "r": 10, "t": 10, "b": 50}, showlegend=False)
    rows = [[name, f"{value:.2f}", f"{low:.2f} to {high:.2f}"] for name, (value, low, high) in factors.items()]
    return Picture(
        name=f"factors-{number}",
        title=f"Rates of {label(hardware_name(kind.hardware))}",
        caption=(
            f"What {calibration.rows} runs say of this hardware: below 1 it is slower than shipped."
            " Bars hold the factor with nine chances in ten."
        ),
        figure=to_plotly(figure),
        table=Table(columns=columns("rate", ">factor", ">90 %"), rows=rows),
    )
