"""Pictures of ranked plans for plotly, on any background: memory against the limit, the parts of a step, the trade."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsplan.render.plan_view import dims_text, limit_bytes
from hardware_db.units import format_bytes, format_seconds, gib
from planner.cost.timing.timeline import Span
from planner.types.plan import Plan

Drawn = Mapping[str, Any]
"""What plotly draws: `data`, `layout`, `config`."""

# Okabe and Ito's palette, whose colours people with any colour vision tell apart, without its yellow and with darker
# shades where 3:1 against white and against black is not reached.
BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#c77700", "#009e73", "#d55e00", "#b8638f", "#3d97cf"
GREY, SILVER = "#767676", "#929292"
EXPOSED = "#d33a5e"
"""Of communication that nothing hides."""
MEMORY: Mapping[str, str] = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "buffers": PINK,
    "temporaries": RED,
    "fragmentation": SILVER,
    "CUDA and libraries": GREY,
}
SECONDS: Mapping[str, str] = {
    "compute": BLUE,
    "communication": ORANGE,
    "offload": RED,
    "optimizer": GREEN,
    "bubble": GREY,
}
STEP: Mapping[str, tuple[str, frozenset[str]]] = {
    "forward": (BLUE, frozenset({"forward"})),
    "backward": (SKY, frozenset({"backward"})),
    "optimizer": (GREEN, frozenset({"optimizer"})),
    "all-gather": (ORANGE, frozenset({"all_gather"})),
    "reduce-scatter, all-reduce": (RED, frozenset({"reduce_scatter", "all_reduce", "all_gather + reduce_scatter"})),
    "inside blocks, offload": (PINK, frozenset({"inside", "offload"})),
    "else": (SILVER, frozenset()),
}
"""Colours of a step on two streams, with the kinds of spans that have them; what has none is `else`."""


def memory(plans: Sequence[Plan]) -> Drawn:
    """Draw the bytes of the busiest GPU at its peak, by category, against the limit.

    With them what torch reserves beyond, what the driver takes, and the upper bound.
    """
    names = _names(plans)
    sizes = {name: [getattr(plan.memory, f"{name}_bytes", 0) for plan in plans] for name in MEMORY}
    sizes["fragmentation"] = [plan.memory.peak_reserved_bytes - plan.memory.peak_allocated_bytes for plan in plans]
    sizes["CUDA and libraries"] = [plan.memory.device_overhead_bytes for plan in plans]
    bars = [_bars(name, names, map(gib, sizes[name]), map(format_bytes, sizes[name])) for name in MEMORY]
    beyond = [gib(plan.memory.device_used_upper_bytes - plan.memory.device_used_bytes) for plan in plans]
    bars[-1]["error_x"] = _error(beyond, [0] * len(plans))
    limits = [gib(limit_bytes(plan)) for plan in plans]
    layout = {**_layout(len(plans), "GiB of a GPU"), "shapes": _limit_lines(limits)}
    return _picture(bars, layout)


def _limit_lines(limits: Sequence[float]) -> list[dict[str, Any]]:
    """One line through all bars, or one through each where their devices have different memory."""
    line = {"type": "line", "line": {"color": RED, "width": 3}}
    if len(set(limits)) == 1:
        return [{**line, "x0": limits[0], "x1": limits[0], "yref": "paper", "y0": 0, "y1": 1}]
    return [
        {**line, "x0": limit, "x1": limit, "yref": "y", "y0": row - 0.45, "y1": row + 0.45}
        for row, limit in enumerate(limits)
    ]


def seconds(plans: Sequence[Plan]) -> Drawn:
    """Return the parts of a step that take its time, with where nine of ten steps should lie."""
    names, times = _names(plans), [plan.time for plan in plans]
    parts = {name: [getattr(time, f"{name}_seconds", 0.0) for time in times] for name in SECONDS}
    parts["communication"] = [time.exposed_communication_seconds for time in times]
    bars = [_bars(name, names, parts[name], map(format_seconds, parts[name])) for name in SECONDS]
    low = [time.step_seconds - (time.step_seconds_low or time.step_seconds) for time in times]
    high = [(time.step_seconds_high or time.step_seconds) - time.step_seconds for time in times]
    steps: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": [time.step_seconds for time in times],
        "y": names,
        "text": [format_seconds(time.step_seconds) for time in times],
        "hovertemplate": "%{y}: one step %{text}<extra></extra>",
        "marker": {"color": GREY, "symbol": "line-ns-open", "size": 12},
        "error_x": _error(high, low),
    }
    return _picture([*bars, steps], _layout(len(plans), "seconds of a step"))


def step(spans: Sequence[Span]) -> Drawn:
    """Return what the busiest rank computes and communicates from the beginning of a step to its end."""
    named = frozenset().union(*(kinds for _, kinds in STEP.values()))
    bars = []
    for colour, kinds in STEP.values():
        shown = [span for span in spans if (span.kind in kinds if kinds else span.kind not in named)]
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": [span.stream for span in shown],
                "base": [span.start for span in shown],
                "x": [span.seconds for span in shown],
                "customdata": [_hover_text(span) for span in shown],
                "hovertemplate": "%{customdata}<extra></extra>",
                "marker": {"color": colour},
            }
        )
    rows = [stream for stream in _STREAMS if any(span.stream == stream for span in spans)]
    layout = _layout(len(rows), "seconds")
    return _picture(bars, {**layout, "barmode": "overlay", "yaxis": {**layout["yaxis"], "categoryarray": rows}})


_STREAMS = ("compute", "communication", "transfer")


def _hover_text(span: Span) -> str:
    exposed = f", {format_seconds(span.exposed)} exposed" if span.exposed else ""
    return f"{span.name}: {format_seconds(span.seconds)}{exposed}"


def trade(plans: Sequence[Plan]) -> Drawn:
    """Time of a step against memory."""
    points = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [gib(plan.memory.device_used_bytes) for plan in plans],
        "y": [plan.time.step_seconds for plan in plans],
        "error_y": _nine_of_ten(plans),
        "text": _ranks_together([(gib(plan.memory.device_used_bytes), plan.time.step_seconds) for plan in plans]),
        "customdata": [
            f"{name}, {dims_text(plan.configuration)}" for name, plan in zip(_names(plans), plans, strict=True)
        ],
        "textposition": "top center",
        "cliponaxis": False,
        "marker": {"color": BLUE, "size": 12, "symbol": "diamond"},
        "hovertemplate": "%{customdata}: %{x:.1f} GiB, %{y:.3g} s<extra></extra>",
    }
    axes = {
        "xaxis": {**_AXIS, "title": {"text": "GiB of a GPU"}},
        "yaxis": {**_AXIS, "title": {"text": "seconds of a step"}},
    }
    return _picture([points], {**_layout(len(plans), ""), "height": 320, **axes})


def _nine_of_ten(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the whiskers of steps, which keep the axis from showing less than predictions are off by."""
    seconds = [plan.time.step_seconds for plan in plans]
    lows = [plan.time.step_seconds_low or plan.time.step_seconds for plan in plans]
    highs = [plan.time.step_seconds_high or plan.time.step_seconds for plan in plans]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - middle for high, middle in zip(highs, seconds, strict=True)],
        "arrayminus": [middle - low for middle, low in zip(seconds, lows, strict=True)],
    }


_ONE_PLACE = 0.03
"""Of the width and of the height of the picture: numbers of marks that are nearer to each other would overlap."""


def _ranks_together(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return the number of every place; of those that are drawn in one place, all numbers at the first of them."""
    spreads = [(max(values) - min(values)) * _ONE_PLACE for values in zip(*places, strict=True)]
    firsts: dict[int, list[str]] = {}
    for index, position in enumerate(places):
        near = (
            first
            for first in firsts
            if all(abs(a - b) <= spread for a, b, spread in zip(position, places[first], spreads, strict=True))
        )
        firsts.setdefault(next(near, index), []).append(str(index + 1))
    return [", ".join(firsts.get(index, ())) for index in range(len(places))]


_AXIS: Mapping[str, Any] = {"automargin": True, "gridcolor": "rgba(128,128,128,0.35)", "zerolinecolor": GREY}


def _layout(plans: int, unit: str) -> dict[str, Any]:
    return {
        "barmode": "stack",
        # Below 64 pixels plotly gives the words of an axis no room beside them.
        "height": 66 + 34 * max(plans, 2),
        "margin": {"l": 10, "r": 20, "t": 10, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "color": GREY},
        "showlegend": False,
        "xaxis": {**_AXIS, "rangemode": "tozero", "title": {"text": unit}},
        "yaxis": {**_AXIS, "autorange": "reversed", "type": "category"},
    }


def _picture(data: list[dict[str, Any]], layout: dict[str, Any]) -> Drawn:
    return {"data": data, "layout": layout, "config": {"displayModeBar": False}}


def _bars(name: str, names: list[str], lengths: Iterable[float], texts: Iterable[str]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": names,
        "x": list(lengths),
        "customdata": list(texts),
        "hovertemplate": "%{y}: " + name + " %{customdata}<extra></extra>",
        "marker": {"color": {**MEMORY, **SECONDS}[name]},
    }


def _error(more: Sequence[float], less: Sequence[float]) -> dict[str, Any]:
    return {"type": "data", "array": more, "arrayminus": less, "color": GREY, "width": 6, "thickness": 2}


def _names(plans: Sequence[Plan]) -> list[str]:
    return [_name(rank, plan) for rank, plan in enumerate(plans, start=1)]


def _name(rank: int, plan: Plan) -> str:
    offload = "" if plan.configuration.offload == "none" else f", {plan.configuration.offload}"
    return f"{rank}. {plan.configuration.strategy}{offload}"
