"""`dsplan estimate`: memory and time of one configuration."""

from __future__ import annotations

from dataclasses import asdict

import typer

from dsplan.cli.flags import (
    ConfigurationFlags,
    ExactFlag,
    HardwareFlags,
    JsonFlag,
    ModelFlags,
    WorkFlags,
    with_flags,
)


@with_flags
def estimate(
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    configuration: ConfigurationFlags,
    exact: ExactFlag = False,
    json: JsonFlag = False,
) -> None:
    """Memory and time of one configuration. Exit status 1 if it does not fit."""
    from dsplan.question import Question, estimated
    from dsplan.render.plan_view import plan_blocks
    from dsplan.render.show import progress, show, show_json
    from planner.search.exact import ExactOptions
    from planner.types.plan_io import plan_to_dict

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    options = ExactOptions(**asdict(configuration), global_batch=work.global_batch)
    with progress() as report:
        request, plan = estimated(question, options, report if exact else None)
    if json:
        show_json(plan_to_dict(plan))
    else:
        show(plan_blocks(plan, request.defaults))
    raise typer.Exit(plan.verdict == "does_not_fit")
