"""`dsplan estimate`: memory and time of one configuration."""

from __future__ import annotations

from dataclasses import asdict

import typer

from dsplan.cli.flags import ConfigurationFlags, HardwareFlags, JsonFlag, ModelFlags, WorkFlags, with_flags


@with_flags
def estimate(
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    configuration: ConfigurationFlags,
    json: JsonFlag = False,
) -> None:
    """Memory and time of one configuration. Exit status 1 if it does not fit."""
    from dsplan.question import Question
    from dsplan.render.plan_view import plan_blocks
    from dsplan.render.show import show, show_json
    from planner.estimate import estimate as priced
    from planner.exact import ExactOptions, exact
    from planner.plan_io import plan_to_dict

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    options = ExactOptions(**asdict(configuration), global_batch=work.global_batch)
    request, chosen = exact(question.request(), options)
    plan = priced(request, chosen)
    if json:
        show_json(plan_to_dict(plan))
    else:
        show(plan_blocks(plan, request.defaults))
    raise typer.Exit(plan.verdict == "does_not_fit")
