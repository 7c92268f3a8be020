"""Plans and their configs as files of one directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text
from planner.emit import FORMATS, emit
from planner.plan import Plan
from planner.plan_io import save_plan


def write_plans(plans: Sequence[Plan], directory: Path) -> None:
    """`plan-1.yaml` and the configs of every format in `plan-1/`, and so on down the ranking.

    Raises:
        BrokenFile: the directory or a file cannot be written.
    """
    for rank, plan in enumerate(plans, start=1):
        _make(directory / f"plan-{rank}")
        save_plan(plan, directory / f"plan-{rank}.yaml")
        for name, text in _configs(plan).items():
            replace_text(directory / f"plan-{rank}" / name, text)


def _configs(plan: Plan) -> dict[str, str]:
    files: dict[str, str] = {}
    for format in FORMATS:
        files |= emit(plan, format)
    return files


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "give --out a directory you can write to"
        raise BrokenFile(directory, f"cannot be made ({error.strerror})", remedy) from error
