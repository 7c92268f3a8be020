"""From what was asked for to the page: an answer, plan files, run directories, or what was learnt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from dsplan.render.answer_html import answer_html, answer_title, rejected_html
from dsplan.render.html import blocks_html, plain
from dsplan.render.plan_view import plan_blocks
from dsplan.render.recommendation import alternatives_table
from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Table, columns
from dsplan.report.page import Page, Section, blocks_section, wide
from dsplan.report.picture import Picture
from dsplan.report.question import answer_pictures, name_of, plans_pictures, scaling_pictures, timeline
from dsplan.report.run_data import RunData, is_run_directory, read_run
from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.handed_in import quote
from hardware_db.units import format_seconds
from planner.calibration.learn import Refreshed
from planner.cost.timing import step_time
from planner.search.estimate import job_of
from planner.search.recall import recall
from planner.search.request import Request, request_of_plan
from planner.search.search import Recommendation
from planner.types.plan import Plan
from planner.types.plan_io import load_plan

if TYPE_CHECKING:
    from dsplan.checking import Checked
    from planner.fleet.scenario import Circumstances, Scene

MOST_SOURCES = 24
"""Plans and runs of one page: as many lines as can be told apart."""


def sources(paths: Sequence[Path]) -> tuple[tuple[Plan, ...], tuple[RunData, ...]]:
    """Return the plans and the runs that paths name: plan files, run directories, and directories with plan files.

    Raises:
        DsplanError: one is neither, or there are too many.
    """
    plans: list[Plan] = []
    runs: list[RunData] = []
    for path in paths:
        if is_run_directory(path):
            runs.append(read_run(path))
        elif path.is_dir():
            files = sorted(path.glob("plan-*.yaml"), key=lambda file: (len(file.name), file.name))
            if not files:
                remedy = "name a plan file, a run directory, or what `dsplan recommend --out` wrote"
                raise BrokenFile(path, "holds neither a plan nor a run", remedy)
            plans += [load_plan(file) for file in files]
        else:
            plans.append(load_plan(path))
    if len(plans) + len(runs) > MOST_SOURCES:
        raise DsplanError(f"{len(plans) + len(runs)} plans and runs are too many for one page; name {MOST_SOURCES}")
    return tuple(plans), tuple(runs)


def answer_page(answer: Recommendation, command: str) -> Page:
    """Return the page of a question; `command` is what asks it in a terminal."""
    leading = answer.plans[0] if answer.plans else answer.closest
    pictures = {picture.name: picture for picture in answer_pictures(answer)}
    side = [pictures.pop(name) for name in ("memory", "phases", "seconds", "trade") if name in pictures]
    step = [pictures.pop(name) for name in ("timeline",) if name in pictures]
    pareto = [pictures.pop(name) for name in ("pareto",) if name in pictures]
    parts = [
        Section(
            name="answer",
            title="The answer",
            html=wide(answer_html(replace(answer, front=())), "The answer"),
            pictures=side,
        )
    ]
    if step:
        parts.append(Section(name="step", title="The step", pictures=step))
    if pictures:
        parts.append(Section(name="scaling", title="Scaling", pictures=tuple(pictures.values())))
    if pareto:
        parts.append(Section(name="cost", title="Time, memory and cost", pictures=pareto))
    parts.append(Section(name="others", title="Why others lost", html=wide(rejected_html(answer), "Why others lost")))
    if leading is not None:
        parts.append(
            _plan_section("plan", "The first plan in figures" if answer.plans else "The closest miss", leading)
        )
        parts.append(_assumptions(leading, answer.request.defaults, command))
    name = str(leading.model.get("name", "")) if leading is not None else answer.request.facts.name
    return _page(f"{_short(name)}: {answer_title(answer)}", _where(leading), parts)


def months_page(
    request: Request, plan: Plan, seen: Scene, sizes: Sequence[Scene], circumstances: Circumstances
) -> Page:
    """Return the page of months of a plan on a cluster that fails."""
    from dsplan.render.fleet_view import scene_blocks
    from dsplan.report.fleet import progress, times

    blocks = scene_blocks(request, plan, seen, sizes, circumstances)
    pictures = [progress(seen, circumstances), times(sizes, request.cluster.gpus_per_node)]
    name = _short(str(plan.model.get("name", "")))
    title = f"{name}: {seen.goodput:.1%} of its throughput where nodes fail"
    return _page(title, _where(plan), [blocks_section("months", "The months", blocks, pictures)])


def check_page(checked: Checked, command: str) -> Page:
    """Return the page of a checked config: the verdict, findings, the better plan with its diff, and what was read."""
    from dsplan.render import check_view

    outcome = checked.audit
    plan, better = outcome.plan, outcome.better
    verdict = blocks_section("verdict", "The verdict", check_view.estimate_blocks(checked))
    parts = [verdict, blocks_section("findings", "Findings", check_view.finding_blocks(outcome.findings))]
    if plan is not None:
        both = [plan] if better is None else [plan, better.plan]
        parts[0] = replace(verdict, pictures=plans_pictures(both))
    if better is not None:
        parts.append(
            Section(
                name="better",
                title="The better plan",
                html=wide(check_view.better_html(better, plan), "The better plan"),
            )
        )
    parts.append(blocks_section("read", "The config as it was read", check_view.reading_blocks(checked.reading)))
    if plan is not None:
        parts.append(_assumptions(plan, outcome.request.defaults if outcome.request is not None else (), command))
    return _page(_short(check_view.check_title(checked)), _where(plan), parts)


def folder_page(rows: Sequence[tuple[str, Checked | str]], title: str) -> Page:
    """Return the page of configs that were checked each by itself, a line for each."""
    from dsplan.render.check_view import folder_blocks

    return _page(_short(title), "", [blocks_section("files", "Configs", folder_blocks(rows))])


def sources_page(plans: Sequence[Plan], runs: Sequence[RunData], calibrated: Refreshed | None) -> Page:
    """Return the page of plans, of runs, and of what was learnt of their hardware.

    Raises:
        DsplanError: there are runs or lessons, and plotly is not installed.
    """
    parts: list[Section] = []
    titles: list[str] = []
    if plans:
        parts += _plans_sections(plans)
        titles.append("1 plan" if len(plans) == 1 else f"{len(plans)} plans")
    if runs:
        parts += _runs_sections(runs)
        titles.append(f"run {_short(runs[0].name)}" if len(runs) == 1 else f"{len(runs)} runs")
    if calibrated is not None:
        parts.append(_calibration_section(calibrated))
        titles.append("what was learnt from runs")
    about = _where(plans[0] if plans else next((run.plan for run in runs if run.plan is not None), None))
    title = " and ".join(titles)
    return _page(title[:1].upper() + title[1:], about, parts)


def _plans_sections(plans: Sequence[Plan]) -> list[Section]:
    table = Table(
        columns=columns("#", "model", "hardware", "strategy"),
        rows=[
            [str(number), _short(str(plan.model.get("name"))), _where(plan), plan.configuration.strategy]
            for number, plan in _number_plans(plans)
        ],
    )
    parts = [blocks_section("plans", "Plans side by side", [table], plans_pictures(plans))]
    requests = {number: request for number, plan in _number_plans(plans) if (request := _request_of(plan)) is not None}
    if requests:
        numbered = [(number, plan) for number, plan in _number_plans(plans) if number in requests]
        named = {name_of(number, plan): (requests[number], plan) for number, plan in numbered}
        parts.append(Section(name="scaling", title="Scaling", pictures=scaling_pictures(named)))
    for number, plan in _number_plans(plans):
        title = f"Plan {number}: {plan.configuration.strategy}"
        more = [*alternatives_table(plan), *_note_what_is_redrawn(plan, requests.get(number))]
        step = [timeline(requests[number], plan, number, f"timeline-{number}")] if number in requests else []
        parts.append(_plan_section(f"plan-{number}", title, plan, more, step))
    parts.append(_assumptions(plans[0], (), "dsplan report PLAN"))
    return parts


def _number_plans(plans: Sequence[Plan]) -> Iterable[tuple[int, Plan]]:
    return enumerate(plans, start=1)


def _request_of(plan: Plan) -> Request | None:
    """Return the question that a plan answers, with what this machine's database knows of it.

    None where it is not known.
    """
    from hardware_db.probe import probe_hardware

    machine = probe_hardware() if plan.cluster.get("vendor") == "cpu" else None
    request = request_of_plan(plan, machine)
    return None if request is None else recall(request)


ALIKE = 0.01
"""Two predictions of a step time that are closer are the same for whoever looks at a picture."""


def _note_what_is_redrawn(plan: Plan, request: Request | None) -> list[Block]:
    """Return what to know of the pictures of a plan's step and of its curves, which its file has not got."""
    if request is None:
        why = "its model or its hardware is none that this dsplan knows"
        return [Text(text=f"The step and the curves of this plan cannot be drawn: {why}.", style="warning")]
    here = step_time(job_of(request, plan.configuration)).step_seconds
    there = plan.time.predicted_step_seconds or plan.time.step_seconds
    if abs(here / there - 1) <= ALIKE:
        return []
    times = f"{format_seconds(there)} in the file, {format_seconds(here)} by what is known here"
    return [
        Text(text=f"The picture of the step and the curves are predicted anew: a step takes {times}.", style="warning")
    ]


def _plan_section(
    name: str, title: str, plan: Plan, more: Sequence[Block] = (), pictures: Sequence[Picture] = ()
) -> Section:
    return blocks_section(name, title, [*plan_blocks(plan), *more], pictures)


def _runs_sections(runs: Sequence[RunData]) -> list[Section]:
    _needs_plotly()
    from dsplan.report.runs import compare_runs, course, predicted_and_measured, run_blocks

    parts = []
    beside = [picture for picture in (predicted_and_measured(runs),) if picture is not None]
    if len(runs) > 1:
        more = compare_runs(runs)
        parts.append(Section(name="runs", title="Runs compared", pictures=[*beside, *([more] if more else [])]))
    for number, run in enumerate(runs, start=1):
        drawn = course(run, name=f"course-{number}")
        pictures = [*(beside if len(runs) == 1 else []), *([drawn] if drawn else [])]
        parts.append(blocks_section(f"run-{number}", f"Run {_short(run.name)}", run_blocks(run), pictures))
    return parts


def _calibration_section(calibrated: Refreshed) -> Section:
    _needs_plotly()
    from dsplan.render.db_view import calibration_blocks
    from dsplan.report.calibration import calibration_pictures

    blocks = (
        calibration_blocks(calibrated, stored=False)
        if calibrated.kinds or calibrated.skipped
        else [Text(text="There is nothing to learn from yet: `dsplan run train.py` stores every run.")]
    )
    return blocks_section("calibration", "Predictions and measurements", blocks, calibration_pictures(calibrated))


def _needs_plotly() -> None:
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        raise DsplanError(
            "plotly is not installed here, and a report draws with it; pip install 'dsplan[report]'"
        ) from None


def _assumptions(plan: Plan, defaults: Sequence[str], command: str) -> Section:
    """Return what was taken for granted, and where figures come from."""
    assumed = list(defaults) or [text for text in [str(plan.cluster.get("assumed") or "")] if text]
    blocks: list[Block] = [Text(text=f"assumed: {text}") for text in assumed]
    blocks.append(
        Table(
            title="where figures come from",
            columns=columns("figures", "source"),
            rows=[[group, str(source)] for group, source in plan.provenance.items()] or [["all", "datasheet"]],
        )
    )
    blocks += [Text(text=f"note: {note}") for note in plan.notes]
    return Section(
        name="assumptions",
        title="Assumptions and sources",
        html=f"{blocks_html(blocks)}<p>The same in a terminal: <code>{plain(command)}</code></p>",
    )


def _where(plan: Plan | None) -> str:
    if plan is None:
        return ""
    cluster = plan.cluster
    nodes = f" on {cluster.get('nodes')} nodes" if cluster.get("nodes") not in (None, 1) else ""
    return f"{cluster.get('gpus')} x {_short(str(cluster.get('device')))}{nodes}"


def _short(name: str) -> str:
    return name if len(name) <= 80 else quote(name)


def _page(title: str, about: str, parts: Sequence[Section]) -> Page:
    from dsplan import __version__

    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Page(
        title=title,
        about=about,
        sections=parts,
        footer=f"Made by dsplan {__version__}, {now}. Nothing here asks the network.",
    )
