"""`dsplan emit`: a plan as the config files of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag

# `dsplan explain`: where the bytes and seconds of a plan go, and why it was chosen.


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `dsplan recommend --out` wrote.")],
    json: JsonFlag = False,
) -> None:
    """Where bytes and seconds of a plan go. Also why the others lost."""
    from dsplan.render.plan_view import plan_blocks
    from dsplan.render.recommendation import alternatives_table
    from dsplan.render.show import show, show_json
    from planner.types.plan_io import load_plan, plan_to_dict

    found = load_plan(plan)
    if json:
        show_json(plan_to_dict(found))
    else:
        show([*plan_blocks(found), *alternatives_table(found)])


def emit(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `dsplan recommend --out` wrote.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="deepspeed, accelerate, huggingface, torchrun, slurm, mpi or kubernetes.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the files there; by default the first one is printed.")
    ] = None,
    nvme_path: Annotated[
        str, typer.Option(metavar="DIR", help="Where a plan with NVMe offload swaps to on every node.")
    ] = "/local_nvme",
    json: JsonFlag = False,
) -> None:
    """Write a plan as the config or launch script of another tool."""
    from dsplan.render.show import show_json
    from planner.emit import EmitOptions, script_duties
    from planner.emit import emit as emit_plan
    from planner.types.plan_io import load_plan

    found, options = load_plan(plan), EmitOptions(nvme_path=nvme_path)
    files = emit_plan(found, format, options)
    if out is not None:
        from dsplan.cli.plan_files import write_files

        write_files(files, out)
    if json:
        show_json({"format": format, "files": files, "script": list(script_duties(found, format, options))})
        return
    if out is None:
        typer.echo(next(iter(files.values())), nl=False)
    else:
        typer.echo("\n".join(str(out / name) for name in files))
    if duties := script_duties(found, format, options):
        typer.echo("The plan holds for a script that", err=True)
    for duty in duties:
        typer.echo(f"  - {duty}", err=True)
