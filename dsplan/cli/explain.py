"""`dsplan explain`: where the bytes and seconds of a plan go, and why it was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `dsplan recommend --out` wrote.")],
    json: JsonFlag = False,
) -> None:
    """Where bytes and seconds of a plan go. Also why the others lost."""
    from dsplan.render.plan_view import plan_blocks
    from dsplan.render.recommendation import alternatives_table
    from dsplan.render.show import show, show_json
    from planner.plan_io import load_plan, plan_to_dict

    found = load_plan(plan)
    if json:
        show_json(plan_to_dict(found))
    else:
        show([*plan_blocks(found), *alternatives_table(found)])
