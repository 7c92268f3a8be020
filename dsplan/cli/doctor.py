"""`dsplan doctor`: what keeps training on a machine, or on the machines of a job, from working or from being fast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag


def doctor(
    directory: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A directory that all nodes have to share, such as that of checkpoints."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check this machine, or all machines of a job: `srun dsplan doctor`.

    Started by srun, mpirun or torchrun on several ranks, it also compares their versions and clocks, looks for shared
    directories, and times an all-reduce on every link. Exit status 1 where something has to be changed.
    """
    from dsplan.diagnostics.doctor.examine import examine
    from dsplan.render import doctor_view as render
    from dsplan.render.show import show, show_json
    from strategies.distributed.excepthook import report_once
    from strategies.distributed.launcher_env import read_process_variables
    from strategies.errors import CannotMeet

    try:
        diagnosis = examine(directory or ())
    except CannotMeet as refusal:
        report_once(refusal)
        raise typer.Exit(refusal.exit_code) from None
    if read_process_variables(os.environ).rank > 0:
        return
    if json:
        show_json(render.as_json(diagnosis))
    else:
        show(render.diagnosis_blocks(diagnosis))
    raise typer.Exit(diagnosis.exit_code)
