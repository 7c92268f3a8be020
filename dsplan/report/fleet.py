"""Pictures of simulated months: how they went, and where their time goes on other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dsplan.render.fleet_view import WORDS
from dsplan.render.table_columns import Table, columns
from dsplan.report.picture import COLOURS, LIMIT, QUIET, Picture
from hardware_db.units import DAY_SECONDS
from planner.fleet.month import KINDS, Kind
from planner.fleet.scenario import Circumstances, Scene

_SHADES = (COLOURS[0], COLOURS[3], LIMIT, COLOURS[2], COLOURS[4], QUIET, "#3d97cf")
_COLOURS: Mapping[Kind, str] = dict(zip(KINDS, _SHADES, strict=True))
_AXIS: Mapping[str, Any] = {"automargin": True}


def progress(seen: Scene, circumstances: Circumstances) -> Picture:
    """Draw the work that is safe over the days of the worst, the middle and the best month."""
    ranked = sorted(seen.months, key=lambda month: month.goodput)
    chosen = {"worst month": ranked[0], "middle month": ranked[len(ranked) // 2], "best month": ranked[-1]}
    whole = circumstances.days
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "x": [0, whole], "y": [0, whole], "hoverinfo": "skip",
            "line": {"color": QUIET, "dash": "dash", "width": 1.5},
        }
    ]  # fmt: skip
    rows = []
    for colour, (name, month) in zip((LIMIT, COLOURS[2], COLOURS[0]), chosen.items(), strict=True):
        days = [at / DAY_SECONDS for at, _ in month.progress]
        safe = [work / DAY_SECONDS for _, work in month.progress]
        data.append(
            {
                "type": "scatter", "mode": "lines", "x": days, "y": safe, "line": {"color": colour},
                "hovertemplate": f"{name}, day %{{x:.1f}}: %{{y:.2f}} days of work<extra></extra>",
            }
        )  # fmt: skip
        rows.append([name, f"{month.goodput:.2%}", str(month.failures), f"{safe[-1]:.2f}"])
    layout = {
        **_layout(360),
        "xaxis": {**_AXIS, "title": {"text": "day"}},
        "yaxis": {**_AXIS, "title": {"text": "days of work that are safe"}, "rangemode": "tozero"},
    }
    return Picture(
        name="progress",
        title="Progress",
        caption="Work that no failure can take back, in days of a job that nothing ever stops: the dashed line.",
        figure={"data": data, "layout": layout},
        legend={"worst month": LIMIT, "middle month": COLOURS[2], "best month": COLOURS[0], "never stopped": QUIET},
        table=Table(columns=columns("month", ">goodput", ">failures", ">days of work"), rows=rows),
    )


def times(sizes: Sequence[Scene], gpus_per_node: int) -> Picture:
    """Draw what the time goes to on each number of GPUs."""
    names = [f"{each.outlook.nodes * gpus_per_node:,}" for each in sizes]
    data, rows, drawn = [], [[name] for name in names], dict[str, str]()
    for kind in KINDS:
        shares = [fmean(month.seconds[kind] / month.duration for month in each.months) for each in sizes]
        if not any(shares):
            continue
        for row, share in zip(rows, shares, strict=True):
            row.append(f"{share:.2%}")
        drawn[WORDS[kind]] = _COLOURS[kind]
        data.append(
            {
                "type": "bar", "orientation": "h", "y": names, "x": shares, "name": WORDS[kind],
                "marker": {"color": _COLOURS[kind]},
                "hovertemplate": f"%{{y}} GPUs, {WORDS[kind]}: %{{x:.2%}}<extra></extra>",
            }
        )  # fmt: skip
    layout = {
        **_layout(100 + 36 * len(names)),
        "barmode": "stack",
        "xaxis": {**_AXIS, "tickformat": ".0%", "title": {"text": "of the time"}},
        "yaxis": {**_AXIS, "type": "category", "autorange": "reversed", "title": {"text": "GPUs"}},
    }
    return Picture(
        name="times",
        title="Where the time goes",
        caption="The same steps and the same checkpoint on other numbers of GPUs, saved as often as is best there.",
        figure={"data": data, "layout": layout},
        legend=drawn,
        table=Table(columns=columns(">GPUs", *(f">{name}" for name in drawn)), rows=rows),
    )


def _layout(height: int) -> dict[str, Any]:
    return {"height": height, "margin": {"l": 10, "r": 20, "t": 10, "b": 48}, "showlegend": False}
