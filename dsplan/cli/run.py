"""`dsplan run`: start a training script under a plan, watch it, and compare it with what was predicted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag

run = typer.Typer(add_completion=False, rich_markup_mode=None)


# Options behind the script belong to the script.
@run.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run_script(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file that trains your model.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Everything after the script is the script's own.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Run this plan instead of making one.")] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Processes; by default one per GPU, two without a GPU.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plan within this strategy only, such as fsdp or zero2.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where logs and metrics go; by default a new one per run.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train with SCRIPT under a plan: the one given, or one made from the script's own model and this machine."""
    from dsplan.render.run_json import report_to_dict
    from dsplan.render.run_view import RunView, report_blocks
    from dsplan.render.show import show, show_json
    from strategies.launch.prepare import RunRequest, prepare
    from strategies.launch.record import record_run
    from strategies.launch.session import RunSession

    launch = prepare(
        RunRequest(
            script=script,
            arguments=tuple(arguments or ()),
            plan_file=plan,
            processes=nproc,
            strategy=strategy,
            run_directory=run_dir,
        )
    )
    if launch.notice:
        print(f"dsplan: {launch.notice}", file=sys.stderr)
    session = RunSession(launch.spec, launch.plan)
    with RunView(ranks=launch.spec.processes, out=sys.stderr if json else sys.stdout) as view:
        for event in session.events():
            view.show(event)
    report = session.report()
    stored = record_run(report)
    if json:
        show_json(report_to_dict(report, stored))
    else:
        show(report_blocks(report))
        typer.echo(stored.sentence)
    if report.outcome.reason:
        where = f"rank {report.outcome.rank}: " if report.outcome.rank is not None else ""
        print(f"dsplan: {where}{report.outcome.reason}; log: {report.outcome.log}", file=sys.stderr)
    raise typer.Exit(report.outcome.exit_code)
