"""`dsplan run`: start a training script under a plan, watch it, and compare it with what was predicted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsplan.cli.flags import JsonFlag, with_flags
from dsplan.cli.run_flags import PlacementFlags, PlanningFlags, SupervisionFlags

if TYPE_CHECKING:
    from strategies.launch.prepare import RunRequest
    from strategies.launch.report import RunReport

run = typer.Typer(add_completion=False, rich_markup_mode=None)


# Options behind the script belong to the script.
@run.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@with_flags
def run_script(
    planning: PlanningFlags,
    placement: PlacementFlags,
    supervision: SupervisionFlags,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="The Python file that trains your model.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Everything after the script is the script's own.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train with SCRIPT under a plan: the one given, or one made from the script's own model and this machine."""
    from dsplan.render.run_json import report_to_dict
    from dsplan.render.run_report import report_blocks
    from dsplan.render.run_view import RunView
    from dsplan.render.show import show, show_json
    from strategies.launch.prepare import prepare
    from strategies.launch.record import record_run
    from strategies.launch.supervisor import Supervisor

    launch = prepare(_request(script, arguments, planning, placement, supervision))
    for notice in filter(None, (launch.notice, _behind_the_script(launch.script.path, launch.spec.arguments))):
        print(f"dsplan: {notice}", file=sys.stderr)
    session = Supervisor(launch.spec, launch.plan, resumes=launch.resumes, resume_from=launch.resume_from)
    with RunView(ranks=launch.ranks, out=sys.stderr if json else sys.stdout) as view:
        for event in session.events():
            view.show(event)
    report = session.report()
    stored = record_run(report)
    _keep_page(report, stored.sentence)
    if json:
        show_json(report_to_dict(report, stored))
    else:
        show(report_blocks(report))
        typer.echo(stored.sentence)
    if report.outcome.reason:
        where = f"rank {report.outcome.rank}: " if report.outcome.rank is not None else ""
        print(f"dsplan: {where}{report.outcome.reason}; log: {report.outcome.log}", file=sys.stderr)
    raise typer.Exit(report.outcome.exit_code)


def _keep_page(report: RunReport, stored: str) -> None:
    """Keep the last page in the run directory; a disk that is full then does not change how the run ended."""
    from dsplan.render.run_report import write_report
    from strategies.launch.report import REPORT_FILE

    try:
        write_report(report, stored)
    except OSError as problem:
        print(f"dsplan: {REPORT_FILE}: {problem.strerror}", file=sys.stderr)


def _behind_the_script(script: Path, arguments: Sequence[str]) -> str:
    """What to say where options of this command stand behind a script that knows none of their names."""
    groups = (PlanningFlags, PlacementFlags, SupervisionFlags)
    ours = {f"--{item.name.replace('_', '-')}" for group in groups for item in fields(group)} | {"--json"}
    source = script.read_text(errors="replace")
    strays = [word for word in (text.partition("=")[0] for text in arguments) if word in ours and word not in source]
    if not strays:
        return ""
    return f"{', '.join(strays)} after the script is the script's; options of dsplan run stand before it"


def _request(
    script: Path | None,
    arguments: list[str] | None,
    planning: PlanningFlags,
    placement: PlacementFlags,
    supervision: SupervisionFlags,
) -> RunRequest:
    """What was asked for, as a value."""
    from strategies.launch.asked import asked_placement, asked_supervision
    from strategies.launch.prepare import RunRequest

    return RunRequest(
        script=script,
        arguments=tuple(arguments or ()),
        plan_file=planning.plan,
        processes=planning.nproc,
        strategy=planning.strategy,
        run_directory=planning.run_dir,
        resume=supervision.resume,
        resume_from=supervision.resume_from or "",
        placement=asked_placement(
            launcher=placement.launcher,
            nodes=placement.nodes,
            rendezvous=placement.rendezvous,
            hostfile=placement.hostfile,
            node_rank=placement.node_rank,
            options=placement.launcher_option,
        ),
        supervision=asked_supervision(
            retries=supervision.retries,
            checkpoints=(supervision.checkpoint_dir, supervision.checkpoint_steps, supervision.checkpoint_minutes),
            hang_minutes=supervision.hang_minutes,
            grace_seconds=supervision.grace_seconds,
            tunes=supervision.tune,
        ),
    )
