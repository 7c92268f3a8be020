"""`dsplan watch`: a run while it goes, from another terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag, number
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
    from dsplan.render.show import show, show_json
    from dsplan.render.watch_view import frame_blocks, frame_of, frame_to_dict

    frame = frame_of(directory, steps)
    if json:
        show_json(frame_to_dict(frame))
    elif once or not sys.stdout.isatty():
        show(frame_blocks(frame, 80))
    else:
        from dsplan.render.live_frames import follow

        follow(lambda: frame_of(directory, steps), every)
