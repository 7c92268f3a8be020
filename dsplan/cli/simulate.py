"""Plans on a cluster that fails, `dsplan simulate`, and on one that is full, `dsplan queue`."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import GoalFlags, HardwareFlags, JsonFlag, ModelFlags, WorkFlags, number
from hardware_db.errors import DsplanError
from hardware_db.records import dataclass
from planner import limits


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFlags:
    """Failures and what follows them; left open they are as the cluster file says, else as published."""

    failures: Annotated[
        float | None, number(limits.FAILURES, "Failures of one node in 1,000 days that end the job.", "N")
    ] = None
    restart_minutes: Annotated[float | None, number(limits.MINUTES, "From a failure to the next step.", "M")] = None
    save_seconds: Annotated[
        float | None, number(limits.SECONDS, "What training waits for a checkpoint, as a run measured it.", "S")
    ] = None
    checkpoint_minutes: Annotated[
        float | None, number(limits.MINUTES, "Work between checkpoints; by default what is best.", "M")
    ] = None
    spares: Annotated[int | None, number(limits.SPARES, "Spare nodes; by default there is always one.")] = None
    repair_hours: Annotated[float | None, number(limits.HOURS, "Until a failed node is a spare one.", "H")] = None
    stragglers: Annotated[float, number(limits.FAILURES, "Nodes that become slow, of 1,000 in a day.", "N")] = 0.0
    slowdown: Annotated[
        float | None, number(limits.IMBALANCE, "Time of a step with a slow node over that without.", "R")
    ] = None
    straggler_hours: Annotated[float | None, number(limits.HOURS, "Until a slow node is replaced.", "H")] = None
    preemptions: Annotated[float, number(limits.FAILURES, "Times a day that others get the nodes.", "N")] = 0.0
    preempted_hours: Annotated[float | None, number(limits.HOURS, "Until the job has them again.", "H")] = None
    elastic: Annotated[bool, typer.Option("--elastic", help="Train on fewer nodes where none is spare.")] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthFlags:
    """Amount of what is simulated."""

    days: Annotated[float, number(limits.DAYS, "Days of a month.", "D")] = 30.0
    months: Annotated[int, number(limits.PLANS, "Months, each with its own luck.")] = 20
    seed: Annotated[int, number(limits.RETRIES, "Another seed is other luck.")] = 0


_OF_THE_CLUSTER = {
    "failures": "failures_per_1000_node_days",
    "restart_minutes": "restart_minutes",
    "save_seconds": "save_seconds",
    "spares": "spare_nodes",
    "repair_hours": "repair_hours",
}
"""Flags by the key of a cluster file that they stand in for."""


def simulate(
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    goal: GoalFlags,
    failing: FailureFlags,
    months: MonthFlags,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write pictures there, as one HTML page (extra `report`).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Months of the first plan on nodes that fail: what is left of its throughput. Exit status 1 if nothing fits.

    Needs `pip install 'dsplan[simulate]'`.
    """
    _require_simpy()
    from dsplan.question import Goal, Question
    from dsplan.render.fleet_view import scene_blocks, scene_to_dict
    from dsplan.render.recommendation import recommendation_blocks
    from dsplan.render.show import say, show, show_json
    from planner.fleet.scenario import Circumstances, at_sizes, scene
    from planner.search.search import recommend

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    request = question.request(**Goal(**asdict(goal)).ranking())
    given = {key: value for flag, key in _OF_THE_CLUSTER.items() if (value := getattr(failing, flag)) is not None}
    stated = replace(request.cluster.reliability, **given)
    request = replace(request, cluster=replace(request.cluster, reliability=stated))
    own = {item.name: getattr(failing, item.name) for item in fields(failing) if item.name not in _OF_THE_CLUSTER}
    circumstances = Circumstances(**own, **asdict(months))
    answer = recommend(request)
    if not answer.plans:
        show(recommendation_blocks(answer))
        raise typer.Exit(1)
    plan = answer.plans[0]
    seen = scene(request, plan, circumstances)
    sizes = at_sizes(seen, request.cluster, circumstances)
    if out is not None:
        from dsplan.report.make import months_page
        from dsplan.report.page import page_html
        from hardware_db.files import replace_text

        replace_text(out, page_html(months_page(request, plan, seen, sizes, circumstances)))
    if json:
        show_json(scene_to_dict(request, plan, seen, sizes, circumstances))
        return
    show(scene_blocks(request, plan, seen, sizes, circumstances))
    if out is not None:
        say(f"the pictures are in {out}")


def _require_simpy() -> None:
    try:
        import simpy  # noqa: F401
    except ImportError:
        raise DsplanError("simpy is not installed here, and months need it; pip install 'dsplan[simulate]'") from None


def queue(
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    goal: GoalFlags,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Handed to sbatch as it is, such as --partition=a100; may be repeated."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Find the number of GPUs that ends first: how long its plan trains, and when SLURM would start it.

    On all the GPUs, half of them, and so on; needs --tokens. Nothing is submitted. Exit status 1 if nothing fits or
    the queue refuses every plan.
    """
    from dsplan.question import Goal, Question
    from dsplan.queueing import look
    from dsplan.render.queue_view import queue_blocks, queue_to_dict
    from dsplan.render.recommendation import recommendation_blocks
    from dsplan.render.show import show, show_json
    from planner.search.search import recommend

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    request = question.request(**Goal(**asdict(goal)).ranking())
    state, turns = look(request, slurm_option or [])
    if not turns:
        show(recommendation_blocks(recommend(request)))
        raise typer.Exit(1)
    if json:
        show_json(queue_to_dict(state, turns))
    else:
        show(queue_blocks(request, state, turns, datetime.now()))
    if all(turn.starts is None for turn in turns):
        raise typer.Exit(1)
