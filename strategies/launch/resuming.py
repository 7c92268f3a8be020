"""`dsplan run --resume DIR`: what was asked for then, with what is asked for now. No torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_db.errors import BrokenFile, DsplanError
from planner.errors import ContradictoryRequest
from strategies.launch.asked import Asked
from strategies.launch.run_state import check_unfinished
from strategies.launch.settings import Placement
from strategies.launch.spec import SPEC_FILE, LaunchSpec
from strategies.variables import PLAN_FILE, STRATEGY

if TYPE_CHECKING:
    from strategies.launch.prepare import RunRequest


def resumed(request: RunRequest, directory: Path) -> RunRequest:
    """The request with everything it leaves open taken from the run in `directory`.

    Raises:
        DsplanError: there is no run to go on with, or one of another version of dsplan, or the request names another
            directory too.
    """
    if request.run_directory is not None:
        raise ContradictoryRequest("--resume goes on in its own directory; leave --run-dir out")
    path = directory / SPEC_FILE
    if not directory.is_dir():
        raise DsplanError(f"{directory}: no such directory; name the run directory that dsplan run printed")
    if not path.exists():
        raise DsplanError(f"{directory}: holds no run to go on with; name the run directory that dsplan run printed")
    check_unfinished(directory)
    earlier = _spec(path)
    plan, strategy = earlier.environment.get(PLAN_FILE), earlier.environment.get(STRATEGY)
    if request.plan_file is not None or request.strategy is not None:
        plan = strategy = None
    return replace(
        request,
        script=request.script or Path(earlier.script),
        arguments=request.arguments if request.script else earlier.arguments,
        plan_file=Path(plan) if plan else request.plan_file,
        strategy=strategy or request.strategy,
        run_directory=directory,
        resume=directory,
        earlier_processes=earlier.processes,
        run_id=earlier.run_id,
        placement=_placement(earlier.placement, request.placement),
        supervision=asdict(earlier.supervision) | request.supervision,
    )


def _spec(path: Path) -> LaunchSpec:
    try:
        return LaunchSpec.load(path)
    except (ValueError, KeyError, TypeError):
        raise BrokenFile(path, "not a run of this version of dsplan", "start a new one") from None


def _placement(earlier: Placement, asked: Asked) -> Asked:
    """Another launcher would not know what the earlier one was told."""
    same = asked.get("launcher", earlier.launcher) == earlier.launcher
    return asdict(earlier) | asked if same else asked
