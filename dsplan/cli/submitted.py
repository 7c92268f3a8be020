"""Common parts of `dsplan run` and `dsplan watch` of runs that are submitted: to a cluster, or to a cloud."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hardware_db.notices import notice

if TYPE_CHECKING:
    from strategies.launch.grace_period import StopRequests
    from strategies.launch.options import RequestedPlacement
    from strategies.launch.report import Outcome
    from strategies.launch.submitted_runs import FollowedRun

TAIL = 40
"""Lines of a log that `watch` begins with."""
SUBMITTED = ("kubernetes", "skypilot")
"""Launchers that submit a job, whose nodes run `dsplan run` with the local one."""


def begins_anew(script: Path | None, planning: Any, placement: RequestedPlacement, supervision: Any) -> bool:
    """Return whether a run is to be submitted, rather than one resumed by its name.

    Raises:
        ContradictoryRequest: neither is said, or something that the nodes of a resumed run would not hear of.
    """
    from planner.errors import ContradictoryRequest
    from strategies.checkpoint.object_store import ObjectPath
    from strategies.run_directory.request import named

    if isinstance(supervision.resume, ObjectPath):
        raise ContradictoryRequest(f"--resume {supervision.resume}: there a run is resumed by its job's name")
    if supervision.resume is None:
        if script is None:
            raise ContradictoryRequest("SCRIPT is missing; name it as the nodes have it, or --resume a run by its name")
        if supervision.resume_from is not None:
            raise ContradictoryRequest("--resume-from says from where --resume resumes a run here; leave it out")
        return True
    others = [*words_of(planning, ()), *words_of(supervision, ("resume",))]
    others += [f"--{name.replace('_', '-')}" for name in named(placement) if name != "launcher"]
    if script is not None or others:
        what = str(script) if script is not None else others[0]
        raise ContradictoryRequest(f"{what}: there --resume resumes the run as it is, by its name alone")
    return False


def words_of(flags: Any, left_out: tuple[str, ...]) -> list[str]:
    """Return a group of flags as they are written on a command line, without those that are left open."""
    words: list[str] = []
    for item in fields(flags):
        value, flag = getattr(flags, item.name), f"--{item.name.replace('_', '-')}"
        if item.name in left_out or value is None or value == item.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no{flag[1:]}")
        else:
            words += [flag, str(value)]
    return words


def follow(
    name: str,
    options: str,
    followed: Callable[[StopRequests], FollowedRun],
    document: Callable[[Outcome | None], dict[str, Any]],
    *,
    detach: bool,
    json: bool,
) -> int:
    """Follow a submitted run to its end, print the last words, and return the exit status.

    `options` are those that name the run's place on a command line, `document` is the run as JSON has it now.
    """
    from dsplan.render.show import show_json
    from strategies.launch.grace_period import StopRequests

    outcome: Outcome | None = None
    if detach:
        notice(f"watch it from anywhere: dsplan watch {name} {options}")
    else:
        with StopRequests() as requests:
            run = followed(requests)
            _print(run, sys.stderr if json else sys.stdout)
            outcome = run.outcome
    if json:
        show_json(document(outcome))
    if outcome is None:
        return 0
    if outcome.reason:
        notice(outcome.reason)
    elif outcome.name != "completed":
        notice(f"resume it from anywhere: dsplan run {options} --resume {name}")
    return outcome.exit_code


def watch(followed: FollowedRun) -> int:
    """Print a run's lines, and return its exit status; Ctrl-C ends the printing alone."""
    with suppress(KeyboardInterrupt):
        _print(followed, sys.stdout)
    return 0 if followed.outcome is None else followed.outcome.exit_code


def _print(followed: FollowedRun, out: TextIO) -> None:
    from hardware_db.notices import printable

    for line in followed.lines():
        print(printable(line), file=out, flush=True)
