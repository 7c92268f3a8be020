"""`dsplan report`: answers, plans and runs as one page to keep and to send."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsplan.cli.flags import GoalFlags, HardwareFlags, JsonFlag, ModelFlags, WorkFlags

if TYPE_CHECKING:
    from dsplan.report.page import Page


def report(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.", show_default=False)],
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    goal: GoalFlags,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PLAN|RUN", help="Plan files or run directories; none to ask as recommend does."),
    ] = None,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="What `dsplan db calibrate` would learn, run by run.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """One HTML page with pictures of an answer, of plans or of runs, which needs no network.

    Without PLAN or RUN it answers the question that the flags ask, as `dsplan recommend` does; exit status 1 if nothing
    fits. Needs `pip install 'dsplan[report]'`.
    """
    from dsplan.render.show import say, show_json
    from dsplan.report.page import page_html
    from hardware_db.files import replace_text
    from hardware_db.units import format_bytes

    flags = _set_flags(model, hardware, work, goal)
    fits = True
    if sources or calibration:
        page = _of_sources(sources or [], flags, calibration=calibration)
    else:
        page, fits = _of_question(model, hardware, work, goal)
    text = page_html(page)
    replace_text(out, text)
    size = out.stat().st_size
    if json:
        show_json({"schema_version": 1, "file": str(out), "bytes": size, "pictures": list(page.pictures)})
    else:
        say(f"{out}: {len(page.pictures)} pictures, {format_bytes(size)}")
    raise typer.Exit(not fits)


def _of_question(model: ModelFlags, hardware: HardwareFlags, work: WorkFlags, goal: GoalFlags) -> tuple[Page, bool]:
    from dsplan.question import Goal, Question
    from dsplan.report.make import answer_page
    from planner.search.rollouts import recommend_ways

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    answer = recommend_ways(question.requests(**Goal(**asdict(goal)).ranking()), with_front=True)
    return answer_page(answer, typed_command()), bool(answer.plans)


def _of_sources(sources: list[Path], flags: list[str], *, calibration: bool) -> Page:
    from dsplan.report.make import sources as read
    from dsplan.report.make import sources_page
    from hardware_db.errors import DsplanError

    if flags:
        what = "the paths" if sources else "--calibration"
        raise DsplanError(f"{', '.join(flags)} ask a question of their own beside {what}; give one or the other")
    plans, runs = read(sources)
    return sources_page(plans, runs, _learnt() if calibration else None)


def _learnt() -> Any:
    from hardware_db.probe import probe_hardware
    from hardware_db.store import open_store
    from planner.calibration.learn import refresh

    with open_store(thorough=True) as store:
        return refresh(store, probe_hardware(), keep=False)


def _set_flags(*groups: Any) -> list[str]:
    """Return the flags that say something else than their defaults."""
    return [
        f"--{item.name.replace('_', '-')}"
        for group in groups
        for item in fields(group)
        if getattr(group, item.name) != item.default
    ]


def typed_command() -> str:
    """Return what was typed, for whoever reads the page."""
    return shlex.join(["dsplan", *sys.argv[1:]])
