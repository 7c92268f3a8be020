"""An answer of `recommend` as HTML: the first plan at a glance, the plans, and why others lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.render.html import blocks_html, plain
from dsplan.render.plan_view import header, interval_text, limit_bytes
from dsplan.render.recommendation import bill, ranked_blocks, rejected_blocks, work_text
from hardware_db.units import format_bytes, format_seconds, three_digits

if TYPE_CHECKING:
    from planner.search.request import Request
    from planner.search.search import Recommendation
    from planner.types.plan import Plan


def answer_html(answer: Recommendation) -> str:
    """Model, hardware and work, the first plan at a glance, and all that are ranked."""
    shown = answer.plans[0] if answer.plans else answer.closest
    about = [] if shown is None else header(shown, answer.request.defaults)
    glance = _glance(answer.request, answer.plans[0]) if answer.plans else ""
    title = answer_title(answer)
    work = f'<p class="style-plain">{plain(work_text(answer.request.workload))}</p>'
    first = f"<section><h2>{plain(title)}</h2>{glance}{blocks_html(about)}{work}</section>"
    return first + blocks_html(ranked_blocks(answer))


def rejected_html(answer: Recommendation) -> str:
    """Return why each of the other strategies is not among the plans."""
    return blocks_html(rejected_blocks(answer)) or "<p>Every strategy is among the plans.</p>"


def answer_title(answer: Recommendation) -> str:
    """Return whether the first plan fits, and which it is."""
    if not answer.plans:
        headline = answer.no_plan().headline
        return headline[0].upper() + headline[1:]
    first = answer.plans[0].configuration
    offload = f" with offload {first.offload}" if first.offload != "none" else ""
    verdict = "Fits" if answer.plans[0].verdict == "fits" else "Fits tightly"
    return f"{verdict}: {first.strategy}{offload}"


def _glance(request: Request, plan: Plan) -> str:
    """Return the figures that people ask for first."""
    memory, rates, cost = plan.memory, plan.throughput, bill(request, plan)
    interval = interval_text(plan.time)
    if plan.configuration.counts_samples:
        rate = ("samples/s", f"{rates.samples_per_second:,.3g}", "")
    else:
        rate = ("tokens/s per GPU", f"{rates.tokens_per_second_per_gpu:,.0f}", "")
    have, most = limit_bytes(plan), memory.device_used_upper_bytes
    tiles = [
        ("one step", format_seconds(plan.time.step_seconds), f"nine of ten: {interval}" if interval else ""),
        rate,
        (
            "memory per GPU",
            format_bytes(memory.device_used_bytes),
            f"of {format_bytes(have)}; nineteen of twenty below {format_bytes(most)}",
        ),
    ]
    if rates.mfu is not None:
        tiles.append(("of the dense peak", f"{rates.mfu:.0%}", "MFU"))
    if cost.days is not None:
        tiles.append(
            ("whole training", f"{three_digits(cost.days)} days", "" if cost.usd is None else f"${cost.usd:,.0f}")
        )
    shown = "".join(
        f"<div><dt>{plain(name)}</dt><dd>{plain(text)}<small>{plain(more)}</small></dd></div>"
        for name, text, more in tiles
    )
    return f'<dl class="glance">{shown}</dl>'
