"""Plans and their configs as files of one directory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from hardware_db.errors import BrokenFile
from hardware_db.files import replace_text
from planner.emit import FORMATS, emit
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from planner.types.plan_io import save_plan


def write_plans(plans: Sequence[Plan], directory: Path) -> None:
    """`plan-1.yaml` and in `plan-1/FORMAT/` its configs, and so on down the ranking.

    A format that has no form of a plan (FSDP as a DeepSpeed config) is left out.

    Raises:
        BrokenFile: the directory or a file cannot be written.
    """
    for rank, plan in enumerate(plans, start=1):
        _make(directory)
        save_plan(plan, directory / f"plan-{rank}.yaml")
        for format in FORMATS:
            # ContradictoryRequest is how a format says that it has no form of this plan.
            with contextlib.suppress(ContradictoryRequest):
                write_files(emit(plan, format), directory / f"plan-{rank}" / format)


def write_files(files: Mapping[str, str], directory: Path) -> None:
    """Files by name into a directory, which is made if need be; each is replaced in one step.

    Raises:
        BrokenFile: the directory or a file cannot be written.
    """
    _make(directory)
    for name, text in files.items():
        replace_text(directory / name, text)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "give --out a directory you can write to"
        raise BrokenFile(directory, f"cannot be made ({error.strerror})", remedy) from error
