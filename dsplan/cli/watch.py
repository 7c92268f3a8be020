"""`dsplan watch` and `dsplan track`: a run while it goes, or when it is over, from another terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag, among, number
from planner import limits


def watch(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory of `dsplan run`.")],
    steps: Annotated[
        int | None,
        number(limits.STEPS, "Steps it shall have, where the script was not told by --steps or --max-steps."),
    ] = None,
    every: Annotated[float, number(limits.ANSWER_SECONDS, "Seconds between two looks.", metavar="S")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    json: JsonFlag = False,
) -> None:
    """Ranks, loss, speed, memory, GPU use and alerts of a run that goes on. Ends with the run; reads files only."""
    from dsplan.render.show import can_redraw, room, show, show_json
    from dsplan.render.watch_view import RunWatch, frame_blocks, frame_of, frame_to_dict

    if json:
        show_json(frame_to_dict(frame_of(directory, steps)))
    elif once or not can_redraw(sys.stdout):
        width, unicode = room()
        show(frame_blocks(frame_of(directory, steps), width, unicode=unicode))
    else:
        from dsplan.render.live_frames import follow

        follow(RunWatch(directory, steps).look, every)


def track(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory of `dsplan run`.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NAME,...",
            help="One or more of tensorboard, wandb, mlflow, trackio.",
            autocompletion=among("strategies.launch.options:TRACKERS"),
        ),
    ],
    json: JsonFlag = False,
) -> None:
    """Send a run to experiment trackers: all that they have not got, and of a run that goes on what follows."""
    from dataclasses import asdict

    from dsplan.diagnostics.tracking.feed import Tracking, read_state
    from dsplan.render.show import say, show_json
    from dsplan.report.run_data import is_run_directory
    from hardware_db.errors import BrokenFile
    from hardware_db.notices import notice
    from strategies.launch.options import check_trackers, parse_trackers

    names = parse_trackers(to)
    check_trackers(names)
    if not is_run_directory(directory):
        raise BrokenFile(directory, "is no run directory", "name a run directory of dsplan run")
    directory = directory.resolve()
    tracking = Tracking(directory, names)
    tracking.start()
    try:
        for line in tracking.follow():
            notice(line)
    finally:
        tracking.close()
    states = {name: read_state(directory, name) for name in names}
    if json:
        show_json({"schema_version": 1, "run": directory.name, "trackers": {n: asdict(s) for n, s in states.items()}})
    else:
        for name, state in states.items():
            say(f"{name}: {state.step} steps, {state.where}" if state.where else f"{name}: nothing")
    raise typer.Exit(0 if all(state.finished for state in states.values()) else 1)
