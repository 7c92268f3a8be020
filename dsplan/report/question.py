"""Pictures of an answer: plans side by side, the first one's step, how all that scales, and the trade with its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from dsplan.render.failures_view import WORTH_A_LINE, outlook_of
from dsplan.render.plan_view import dims_text, limit_bytes, rollout_text, verdict_line
from dsplan.render.recommendation import bill, plans_table, scaling_table
from dsplan.render.table_columns import Table, columns
from dsplan.report import plans as side_by_side
from dsplan.report.picture import COLOURS, LIMIT, QUIET, Picture, label, line_style
from hardware_db.units import common_unit, format_bytes, format_count, format_seconds, gib, three_digits
from planner.cost.timing.timeline import Span, step_timeline
from planner.search.estimate import job_of
from planner.search.request import Request
from planner.search.scaling import Rate, over_devices, over_lengths, over_micro_batches, rates
from planner.search.search import Recommendation
from planner.types.plan import Plan

_MISSING = "-"
_PHASES = (
    *("load", "forward", "loss", "backward", "step"),
    *("generate", "reward", "reference", "logprob", "update", "sync", "eval", "save"),
)


def answer_pictures(answer: Recommendation) -> tuple[Picture, ...]:
    """All pictures of an answer that has plans; of one without, those of the closest miss."""
    if not answer.plans:
        return () if answer.closest is None else tuple(_misses(answer.closest))
    request, plans = answer.request, answer.plans
    questions = {name_of(number, plan): (request, plan) for number, plan in enumerate(plans, start=1)}
    return (
        *plans_pictures(plans),
        timeline(request, plans[0]),
        *scaling_pictures(questions),
        *front(request, answer.front),
    )


def _misses(plan: Plan) -> Iterable[Picture]:
    """Those of a plan that is no answer: what does not fit need not be the GPU's memory, which is all they show."""
    first, *more = plans_pictures([plan])
    return (replace(first, caption=f"{first.caption} The {escape(verdict_line(plan), quote=False)}."), *more)


def plans_pictures(plans: Sequence[Plan]) -> tuple[Picture, ...]:
    """Plans side by side: memory, time, and one against the other. They may be for different models and devices."""
    pictures = [memory(plans), phases(plans[0]), seconds(plans), *rounds(plans[0])]
    return (*pictures, trade(plans)) if len(plans) > 1 else tuple(pictures)


Asked = Mapping[str, tuple[Request, Plan]]
"""Plans with the question that each answers, by name."""


def scaling_pictures(questions: Asked) -> tuple[Picture, ...]:
    """Return how the first plan changes over GPUs, and all of them over micro-batches and sequence lengths."""
    request, first = next(iter(questions.values()))
    over = over_devices(request, first)
    return (
        *devices(over, grows=any("--global-batch" in text for text in request.defaults)),
        *goodput(request, over),
        *micro_batches({name: over_micro_batches(*pair) for name, pair in questions.items()}),
        *lengths({name: over_lengths(*pair) for name, pair in questions.items()}),
    )


def name_of(number: int, plan: Plan) -> str:
    """Return what pictures and tables call a plan."""
    return f"{number}. {plan.configuration.strategy}"


# Memory and time of plans side by side.


def memory(plans: Sequence[Plan]) -> Picture:
    """Bytes by category against the limit."""
    rows = []
    for number, plan in enumerate(plans, start=1):
        estimate = plan.memory
        sizes = [getattr(estimate, f"{name}_bytes", 0) for name in side_by_side.MEMORY]
        sizes[-2:] = [estimate.peak_reserved_bytes - estimate.peak_allocated_bytes, estimate.device_overhead_bytes]
        totals = (estimate.device_used_bytes, estimate.device_used_upper_bytes, limit_bytes(plan))
        rows.append([name_of(number, plan), *map(format_bytes, (*sizes, *totals))])
    heading = columns("plan", *(f">{name}" for name in (*side_by_side.MEMORY, "in use", "upper bound", "limit")))
    figure = side_by_side.memory(plans)
    return Picture(
        name="memory",
        title="Memory of a GPU by category",
        caption="At the peak of a step on the busiest GPU. The line is the limit, the whisker reaches the upper bound.",
        figure=figure,
        legend=_of_what_is_drawn(side_by_side.MEMORY, figure),
        table=Table(columns=heading, rows=rows),
    )


def _of_what_is_drawn(legend: Mapping[str, str], figure: Mapping[str, Any]) -> dict[str, str]:
    names = {bar["name"] for bar in figure["data"] if "name" in bar and any(bar["x"])}
    return {name: colour for name, colour in legend.items() if name in names}


def phases(plan: Plan) -> Picture:
    """Return what torch allocates at most in each phase of a step."""
    peaks = {name: plan.memory.phases[name] for name in _PHASES if name in plan.memory.phases}
    limit = limit_bytes(plan)
    peak = plan.memory.peak_phase
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": list(peaks),
        "x": [gib(size) for size in peaks.values()],
        "customdata": [format_bytes(size) for size in peaks.values()],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        "marker": {"color": [side_by_side.ORANGE if name == peak else side_by_side.BLUE for name in peaks]},
    }
    layout = {
        **_layout(len(peaks) * 30 + 70),
        "xaxis": {"title": {"text": "GiB of a GPU"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "shapes": [_limit_line(gib(limit))],
    }
    rows = [[name, format_bytes(size), f"{size / limit:.0%}"] for name, size in peaks.items()]
    return Picture(
        name="phases",
        title=f"Memory by phase, plan 1: {label(plan.configuration.strategy)}",
        caption=(
            f"The most that torch allocates in each phase; the peak is in {label(peak)}. The line is the limit,"
            f" {format_bytes(limit)}; CUDA and libraries take {format_bytes(plan.memory.device_overhead_bytes)} of it."
        ),
        figure={"data": [bar], "layout": layout},
        legend={"the peak": side_by_side.ORANGE, "other phases": side_by_side.BLUE},
        table=Table(columns=columns("phase", ">allocated", ">of the limit"), rows=rows),
    )


def rounds(plan: Plan) -> tuple[Picture, ...]:
    """Return the seconds of a round of generation and training by phase; nothing where nothing is generated."""
    time = plan.time
    if not time.phases or time.round_seconds is None:
        return ()
    slowest = max(time.phases, key=lambda name: time.phases[name])
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": list(time.phases),
        "x": list(time.phases.values()),
        "customdata": [format_seconds(part) for part in time.phases.values()],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        "marker": {"color": [side_by_side.ORANGE if name == slowest else side_by_side.BLUE for name in time.phases]},
    }
    layout = {
        **_layout(len(time.phases) * 30 + 70),
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }
    rows = [[name, format_seconds(part), f"{part / time.round_seconds:.0%}"] for name, part in time.phases.items()]
    return (
        Picture(
            name="rounds",
            title=f"A round of generation and training, plan 1: {label(plan.configuration.strategy)}",
            caption=(
                f"All phases of a round, which takes {format_seconds(time.round_seconds)}; an optimizer step has"
                f" {format_seconds(time.step_seconds)} of it. Generation: {label(rollout_text(plan.workload))}."
            ),
            figure={"data": [bar], "layout": layout},
            legend={"the slowest": side_by_side.ORANGE, "other phases": side_by_side.BLUE},
            table=Table(columns=columns("phase", ">time", ">of the round"), rows=rows),
        ),
    )


def _limit_line(at: float) -> dict[str, Any]:
    return {
        "type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": LIMIT, "width": 3},
    }  # fmt: skip


def seconds(plans: Sequence[Plan]) -> Picture:
    """Return the parts of a step that take its time."""
    rows = []
    for number, plan in enumerate(plans, start=1):
        time = plan.time
        between = (
            _MISSING
            if time.step_seconds_low is None or time.step_seconds_high is None
            else f"{format_seconds(time.step_seconds_low)} to {format_seconds(time.step_seconds_high)}"
        )
        hidden = time.communication_seconds - time.exposed_communication_seconds
        parts = (
            time.step_seconds, time.compute_seconds, time.exposed_communication_seconds, hidden, time.offload_seconds,
            time.optimizer_seconds, time.bubble_seconds,
        )  # fmt: skip
        rows.append([name_of(number, plan), *map(format_seconds, parts), between])
    names = (
        ">step", ">compute", ">exposed communication", ">hidden communication", ">offload", ">optimizer", ">bubble",
        ">nine of ten",
    )  # fmt: skip
    figure = side_by_side.seconds(plans)
    legend = _of_what_is_drawn(side_by_side.SECONDS, figure)
    about_communication = "Communication is what no compute hides. " if "communication" in legend else ""
    return Picture(
        name="seconds",
        title="Where the time of a step goes",
        caption=f"{about_communication}The whisker is where nine of ten steps should lie.",
        figure=figure,
        legend=legend,
        table=Table(columns=columns("plan", *names), rows=rows),
    )


def trade(plans: Sequence[Plan]) -> Picture:
    """Time of a step against memory."""
    unit = common_unit(plan.time.step_seconds for plan in plans)
    rows = [
        [
            name_of(number, plan),
            format_bytes(plan.memory.device_used_bytes),
            format_seconds(plan.time.step_seconds, unit),
        ]
        for number, plan in enumerate(plans, start=1)
    ]
    return Picture(
        name="trade",
        title="Step time against memory",
        caption="Further down is faster, further left is smaller; the whisker is where nine of ten steps should lie."
        " Numbers are those of the plans.",
        figure=side_by_side.trade(plans),
        table=Table(columns=columns("plan", ">memory of a GPU", ">step"), rows=rows),
    )


# The step on two streams.


def timeline(request: Request, plan: Plan, number: int = 1, name: str = "timeline") -> Picture:
    """Return what the busiest rank computes and communicates, and when."""
    spans = step_timeline(job_of(request, plan.configuration))
    exposed, hidden = plan.time.exposed_communication_seconds, plan.time.communication_seconds
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.stream, span.kind.replace("_", "-")), []).append(span)
    rows = [
        [stream, kind, str(len(members)), *(format_seconds(sum(part)) for part in _sums(members))]
        for (stream, kind), members in groups.items()
    ]
    streams = len({span.stream for span in spans})
    seconds = format_seconds(max((span.end for span in spans), default=0.0))
    sentence = (
        f"{format_seconds(exposed)} of communication are exposed, {format_seconds(max(0.0, hidden - exposed))} are"
        " hidden behind compute; waits too short to see are drawn together."
        if hidden
        else "nothing is communicated."
    )
    return Picture(
        name=name,
        title=(
            f"The step of plan {number} on {_STREAMS.get(streams, streams)} stream{'' if streams == 1 else 's'}:"
            f" {label(plan.configuration.strategy)}"
        ),
        caption=f"One step of the busiest rank, {seconds}: {sentence}",
        figure=_add_exposed(spans),
        legend={
            **{name: colour for name, (colour, kinds) in side_by_side.STEP.items() if _is_drawn(kinds, spans)},
            **({"exposed": side_by_side.EXPOSED} if exposed else {}),
        },
        table=Table(columns=columns("stream", "what", ">spans", ">seconds", ">of them exposed"), rows=rows),
    )


_STREAMS = {1: "one", 2: "two", 3: "three"}


def _add_exposed(spans: Sequence[Span]) -> Mapping[str, Any]:
    """Return the two streams, and below them when nothing is computed beside the communication."""
    figure = side_by_side.step(spans)
    exposures = list(_exposures(spans))
    if not exposures:
        return figure
    bars = {
        "type": "bar", "orientation": "h", "y": [_EXPOSED] * len(exposures),
        "base": [end - seconds for end, seconds, _ in exposures], "x": [seconds for _, seconds, _ in exposures],
        "customdata": [f"{name}: {format_seconds(seconds)} exposed" for _, seconds, name in exposures],
        "hovertemplate": "%{customdata}<extra></extra>", "marker": {"color": side_by_side.EXPOSED},
    }  # fmt: skip
    layout = figure["layout"]
    streams = [*layout["yaxis"]["categoryarray"], _EXPOSED]
    yaxis, height = {**layout["yaxis"], "categoryarray": streams}, 66 + 45 * len(streams)
    return {
        **figure,
        "data": [*figure["data"], bars],
        "layout": {**layout, "height": height, "yaxis": yaxis},
    }


_EXPOSED = "exposed"
_NARROWEST = 1 / 400
"""Of a step: what is narrower would be drawn as wide as a line, and hundreds of such as a wide bar."""


def _exposures(spans: Sequence[Span]) -> Iterator[tuple[float, float, str]]:
    """Yield ends, seconds and names of communication that nothing hides; short ones together."""
    narrowest = max((span.end for span in spans), default=0.0) * _NARROWEST
    seconds, last = 0.0, None
    for span in spans:
        if span.exposed > 0:
            seconds, last = seconds + span.exposed, span
            if seconds >= narrowest:
                yield span.end, seconds, span.name
                seconds = 0.0
    if last is not None and seconds:
        yield last.end, seconds, last.name


def _is_drawn(kinds: frozenset[str], spans: Sequence[Span]) -> bool:
    if kinds:
        return any(span.kind in kinds for span in spans)
    named = frozenset().union(*(others for _, others in side_by_side.STEP.values()))
    return any(span.kind not in named for span in spans)


def _sums(spans: Iterable[Span]) -> tuple[list[float], list[float]]:
    listed = list(spans)
    return [span.seconds for span in listed], [span.exposed for span in listed]


# Scaling.


def devices(plans: Sequence[Plan], *, grows: bool) -> Iterable[Picture]:
    """Throughput of all GPUs over their number, beside that of the fewest times as many; nothing for one number.

    `grows` says that the global batch does as well.
    """
    if len(plans) < 2:
        return
    counts = [plan.configuration.world_size for plan in plans]
    points = rates(plans)
    each, ideal = [rate.per_second for rate in points], [rate.per_second / rate.of_linear for rate in points]
    words = [
        f"{count} GPUs, {rate.plan.configuration.strategy}: {format_count(rate.per_second)} {_counted(rate.plan)}/s,"
        f" {rate.of_linear:.0%}"
        for count, rate in zip(counts, points, strict=True)
    ]
    lines = [
        {
            "type": "scatter", "mode": "lines", "x": counts, "y": ideal, "hoverinfo": "skip",
            "line": {"color": QUIET, "dash": "dash", "width": 1.5},
        },
        {
            "type": "scatter", "mode": "lines+markers", "x": counts, "y": each, "customdata": words,
            "hovertemplate": "%{customdata}<extra></extra>", "line": {"color": COLOURS[0]}, "marker": {"size": 9},
        },
    ]  # fmt: skip
    counted = _counted(plans[0])
    layout = {
        **_layout(340),
        "xaxis": {"type": "log", "title": {"text": "GPUs"}, "tickvals": counts, "ticktext": [str(n) for n in counts]},
        "yaxis": {"title": {"text": f"{counted}/s, all GPUs"}, **_log_axis(each)},
    }
    linear = f"{counts[0]} GPU{'s' if counts[0] > 1 else ''} times as many"
    batch = "grows with them" if grows else "stays, or is the next that they can share"
    yield Picture(
        name="gpus",
        title="Throughput over GPUs",
        caption=(
            f"The first plan on each number of GPUs. The global batch {batch}. On the dashed line {counted}/s grow as"
            f" the GPUs do{_why_above(points)}."
        ),
        figure={"data": lines, "layout": layout},
        legend={"first plan": COLOURS[0], linear: QUIET},
        signs={linear: "\u2504\u2504"},
        table=scaling_table(points),
    )


def goodput(request: Request, plans: Sequence[Plan]) -> Iterable[Picture]:
    """Draw the share of the throughput that failures leave over the number of GPUs, where that is worth a picture."""
    aheads = [outlook_of(_on_its_nodes(request, plan), plan) for plan in plans]
    seen = [(plan.configuration.world_size, ahead) for plan, ahead in zip(plans, aheads, strict=True) if ahead]
    if not seen or min(ahead.goodput for _, ahead in seen) >= WORTH_A_LINE:
        return
    counts = [gpus for gpus, _ in seen]
    left = [ahead.goodput for _, ahead in seen]
    ranges = [ahead.goodput_range for _, ahead in seen]
    line = {
        "type": "scatter", "mode": "lines+markers", "x": counts, "y": left, "line": {"color": COLOURS[0]},
        "marker": {"size": 9}, "hovertemplate": "%{x} GPUs: %{y:.1%}<extra></extra>",
        "error_y": {
            "type": "data", "symmetric": False,
            "array": [high - share for share, (_, high) in zip(left, ranges, strict=True)],
            "arrayminus": [share - low for share, (low, _) in zip(left, ranges, strict=True)],
        },
    }  # fmt: skip
    layout = {
        **_layout(320),
        "xaxis": {"type": "log", "title": {"text": "GPUs"}, "tickvals": counts, "ticktext": list(map(str, counts))},
        "yaxis": {"tickformat": ".0%", "title": {"text": "of the throughput"}},
    }  # fmt: skip
    rows = [
        [
            f"{gpus:,}", format_seconds(ahead.mttf_seconds), format_seconds(ahead.interval_seconds),
            f"{ahead.goodput:.2%}", f"{low:.2%}", f"{high:.2%}",
        ]
        for (gpus, ahead), (low, high) in zip(seen, ranges, strict=True)
    ]  # fmt: skip
    names = columns(">GPUs", ">a failure every", ">saved every", ">goodput", ">at most failures", ">at fewest")
    yield Picture(
        name="goodput",
        title="Goodput over GPUs",
        caption=(
            f"What failures and saving as often as is best leave of the throughput. {label(seen[-1][1].said)} says how"
            " often nodes fail; whiskers reach to the rates of other publications."
        ),
        figure={"data": [line], "layout": layout},
        table=Table(columns=names, rows=rows),
    )


def _on_its_nodes(request: Request, plan: Plan) -> Request:
    """Return the request with as many nodes as a plan on another number of devices has."""
    nodes, each = plan.cluster.get("nodes") or 1, plan.cluster.get("gpus_per_node") or 1
    return replace(request, cluster=replace(request.cluster, nodes=nodes, gpus_per_node=each))


def _why_above(points: Sequence[Rate]) -> str:
    """More than linear growth looks like a mistake to whoever does not know why."""
    above = any(rate.of_linear > 1 for rate in points)
    return ": more of them have room for what fewer must recompute, offload or split" if above else ""


Curves = Mapping[str, Sequence[Plan]]
"""Plans at several sizes by the name of the plan that they vary."""


def micro_batches(curves: Curves) -> Iterable[Picture]:
    """Throughput and memory over the micro-batch; nothing where no plan has a choice."""
    yield from _curves(
        curves,
        name="micro-batch",
        title="Micro-batch",
        axis="micro-batch of a GPU, samples",
        size=lambda plan: plan.configuration.micro_batch_size,
        caption="The global batch stays: a larger micro-batch is accumulated less often.",
    )


def lengths(curves: Curves) -> Iterable[Picture]:
    """Throughput and memory over the sequence length; nothing where the model has none or one."""
    yield from _curves(
        curves,
        name="sequence",
        title="Sequence length",
        axis="tokens of a sequence",
        size=lambda plan: plan.configuration.sequence_length,
        caption="As many samples as before, each longer or shorter.",
    )


def _curves(
    curves: Curves, *, name: str, title: str, axis: str, size: Callable[[Plan], int], caption: str
) -> Iterable[Picture]:
    shown = {plan: points for plan, points in curves.items() if len(points) > 1}
    if not shown:
        return
    sizes = sorted({size(point) for points in shown.values() for point in points})
    anyone = next(iter(shown.values()))[0]
    data, rows = [], []
    for index, (plan, points) in enumerate(shown.items()):
        data += _lines(plan, points, size, line_style(index))
        rows += [
            [
                plan, str(size(point)), f"{_rate(point):,.0f}", format_seconds(point.time.step_seconds),
                format_bytes(point.memory.device_used_bytes), format_bytes(point.memory.device_used_upper_bytes),
                point.verdict.replace("_", " "),
            ]
            for point in points
        ]  # fmt: skip
    limits = sorted({gib(limit_bytes(points[0])) for points in shown.values()})
    most = max(gib(point.memory.device_used_bytes) for points in shown.values() for point in points)
    # On a phone there is room for half a dozen numbers; every size has its line.
    words = [
        "" if len(sizes) > _MOST_MARKS and (len(sizes) - position) % 2 else f"{n:,}"
        for position, n in enumerate(sizes, 1)
    ]
    ticks = {"type": "log", "tickvals": sizes, "ticktext": words}
    layout = {
        **_layout(500),
        "xaxis": {**ticks, "anchor": "y", "matches": "x2", "showticklabels": False},
        "xaxis2": {**ticks, "anchor": "y2", "title": {"text": axis}},
        "yaxis": {"domain": [0.54, 1], "rangemode": "tozero", "title": {"text": f"{_counted(anyone)}/s of a GPU"}},
        "yaxis2": {"domain": [0, 0.46], "title": {"text": "GiB of a GPU"}, **_memory_axis(most, limits[-1])},
        "shapes": [
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": limit, "y1": limit,
                "line": {"color": LIMIT, "width": 3},
            }
            for limit in limits
        ],
    }  # fmt: skip
    heading = columns(
        "plan", f">{title.lower()}", f">{_counted(anyone)}/s of a GPU", ">step", ">memory", ">upper bound"
    )
    yield Picture(
        name=name,
        title=title,
        caption=f"{caption} Open marks do not fit; the thick line is the limit.",
        figure={"data": data, "layout": layout},
        legend={plan: line_style(index)["color"] for index, plan in enumerate(shown)},
        table=Table(columns=(*heading, *columns("verdict")), rows=rows),
    )


_MOST_MARKS = 6


def _memory_axis(most: float, limit: float) -> dict[str, Any]:
    """From zero on, unless what does not fit would press all that fits flat."""
    return {"rangemode": "tozero"} if most < 4 * limit else _log_axis([limit / 10, most])


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Lay out a logarithmic axis with marks at 1, 2 and 5, so that they have room on a phone and on paper.

    Over more than two decades they are at 1, over less than one at more than these; where the values are nearly alike
    the axis is linear.
    """
    ratio = max(values) / min(values)
    if ratio < 2:
        return {"tickformat": "~s"}
    if ratio < 10:
        decade = math.floor(math.log10(min(values)))
        marks = [step * 10.0 ** (decade + more) for more in (0, 1) for step in (1, 1.5, 2, 3, 4, 5, 7)]
        return {"type": "log", "tickformat": "~s", "tickvals": [float(f"{mark:.2g}") for mark in marks]}
    return {"type": "log", "tickformat": "~s", "dtick": 1 if ratio > 100 else "D2"}


def _lines(
    name: str, points: Sequence[Plan], size: Callable[[Plan], int], style: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a line of throughput above one of memory."""
    words = [
        f"{name}, {size(point):,}: {_rate(point):,.0f} {_counted(point)}/s of a GPU,"
        f" {format_bytes(point.memory.device_used_bytes)}, {point.verdict.replace('_', ' ')}"
        for point in points
    ]
    symbols = ["circle-open" if point.verdict == "does_not_fit" else "circle" for point in points]
    line = {
        "type": "scatter", "mode": "lines+markers", "x": [size(point) for point in points], "customdata": words,
        "hovertemplate": "%{customdata}<extra></extra>", "line": dict(style),
        "marker": {"symbol": symbols, "size": 9},
    }  # fmt: skip
    return [
        {**line, "y": [_rate(point) for point in points], "xaxis": "x", "yaxis": "y"},
        {**line, "y": [gib(point.memory.device_used_bytes) for point in points], "xaxis": "x2", "yaxis": "y2"},
    ]


def _rate(plan: Plan) -> float:
    """Tokens of a GPU per second, or samples where those are what counts."""
    if plan.configuration.counts_samples:
        return plan.throughput.samples_per_second / plan.configuration.world_size
    return plan.throughput.tokens_per_second_per_gpu


def _counted(plan: Plan) -> str:
    return "samples" if plan.configuration.counts_samples else "tokens"


# The Pareto front, with its cost.


def front(request: Request, plans: Sequence[Plan]) -> Iterable[Picture]:
    """Return what a token costs against the time of a step, for plans that no other beats; nothing for a single one."""
    if len(plans) < 2:
        return
    bills = [bill(request, plan) for plan in plans]
    prices = [per_token.usd_per_million_tokens for per_token in bills]
    priced = all(price is not None for price in prices)
    costs = prices if priced else [per_token.gpu_hours_per_million_tokens for per_token in bills]
    unit = "$" if priced else "GPU-hours"
    counts = sorted({plan.configuration.world_size for plan in plans})
    times, positive = [plan.time.step_seconds for plan in plans], [cost for cost in costs if cost]
    data = []
    for index, count in enumerate(counts):
        chosen = [number for number, plan in enumerate(plans) if plan.configuration.world_size == count]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [times[number] for number in chosen],
                "y": [costs[number] for number in chosen],
                "customdata": [
                    f"{plans[number].configuration.strategy}, {dims_text(plans[number].configuration)}, {count} GPUs:"
                    f" {format_seconds(plans[number].time.step_seconds)},"
                    f" {format_bytes(plans[number].memory.device_used_bytes)},"
                    f" {three_digits(costs[number] or 0.0)} {unit} per million tokens"
                    for number in chosen
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
                "marker": {
                    # The more memory, the larger: area is memory.
                    "size": [_diameter(plans[number], plans) for number in chosen],
                    "color": COLOURS[index % len(COLOURS)],
                    "symbol": _SYMBOLS[index % len(_SYMBOLS)],
                    "opacity": 0.85,
                },
            }
        )
    layout = {
        **_layout(380),
        "xaxis": {"title": {"text": "seconds of a step"}, **_log_axis(times), "tickformat": "~g"},
        "yaxis": {"title": {"text": f"{unit} per million tokens"}, **_log_axis(positive), "tickformat": "~g"},
    }
    names = [f"{count} GPU{'s' if count > 1 else ''}" for count in counts]
    yield Picture(
        name="pareto",
        title="Time, memory and cost",
        caption=(
            "Plans that no other beats in time, memory and number of GPUs at once; the more memory a GPU needs, the"
            f" larger the mark. {'' if priced else 'Cost is in GPU-hours: no price is known.'}"
        ),
        figure={"data": data, "layout": layout},
        legend={name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)},
        signs={name: _GLYPHS[index % len(_GLYPHS)] for index, name in enumerate(names)},
        table=_front_table(request, plans, [three_digits(cost or 0.0) for cost in costs], unit),
    )


_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down")
_GLYPHS = ("\u25cf", "\u25a0", "\u25c6", "\u25b2", "\u271a", "\u2605", "\u25bc")
"""The same as letters. There is one more of them than colours, so that the first 42 numbers of GPUs differ in one."""


def _diameter(plan: Plan, plans: Sequence[Plan]) -> float:
    most = max(other.memory.device_used_bytes for other in plans)
    return float(6 + 14 * (plan.memory.device_used_bytes / max(1, most)) ** 0.5)


def _front_table(request: Request, plans: Sequence[Plan], costs: Sequence[str], unit: str) -> Table:
    table = plans_table(request, plans)
    heading = columns(">GPUs", f">{unit}/Mtoken")
    more = [[str(plan.configuration.world_size), cost] for plan, cost in zip(plans, costs, strict=True)]
    return Table(
        columns=(*table.columns, *heading), rows=[[*row, *last] for row, last in zip(table.rows, more, strict=True)]
    )


def _layout(height: int) -> dict[str, Any]:
    return {"height": height, "margin": {"l": 10, "r": 20, "t": 10, "b": 40}, "showlegend": False}
