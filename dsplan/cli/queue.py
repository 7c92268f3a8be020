"""`dsplan queue`: of the plans that fit, the one that ends first, with the wait in a SLURM queue."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from dsplan.cli.flags import GoalFlags, HardwareFlags, JsonFlag, ModelFlags, WorkFlags


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
