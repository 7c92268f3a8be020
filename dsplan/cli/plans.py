"""`dsplan recommend`, `estimate`, `max`, `explain` and `emit`: plans ranked, priced, explained, written as configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsplan.cli.flags import (
    ConfigurationFlags,
    ExactFlag,
    HardwareFlags,
    JsonFlag,
    MaximumFlags,
    ModelFlags,
    RankingFlags,
    WorkFlags,
    among,
)

if TYPE_CHECKING:
    from dsplan.question import Goal
    from planner.search.request import Request
    from planner.search.scaling import Rate
    from planner.search.search import Recommendation
    from planner.types.plan import Plan


def estimate(
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    configuration: ConfigurationFlags,
    exact: ExactFlag = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan there, for `dsplan run --plan`, `emit` and `report`."),
    ] = None,
    chrome_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the step on its streams there, for Perfetto or chrome://tracing."),
    ] = None,
    memory_snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the memory of a step there, for pytorch.org/memory_viz.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Memory and time of one configuration. Exit status 1 if it does not fit."""
    from dsplan.question import Question, estimate_question
    from dsplan.render.plan_view import plan_blocks
    from dsplan.render.show import progress, say, show, show_json
    from planner.search.exact import ExactOptions
    from planner.types.plan_io import plan_to_dict, save_plan

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    options = ExactOptions(
        **asdict(configuration), global_batch=work.global_batch, prompts_per_step=work.prompts_per_step
    )
    with progress() as report:
        request, plan = estimate_question(question, options, report if exact else None)
    written = _write_views(request, plan, chrome_trace, memory_snapshot)
    if out is not None:
        save_plan(plan, out)
        written.append(("the plan", out))
    if json:
        show_json(plan_to_dict(plan))
    else:
        show(plan_blocks(plan, request.defaults))
        for what, path in written:
            say(f"{what} is in {path}")
    raise typer.Exit(plan.verdict == "does_not_fit")


def _write_views(
    request: Request, plan: Plan, chrome_trace: Path | None, memory_snapshot: Path | None
) -> list[tuple[str, Path]]:
    """Write what was asked for; what each file is, and where."""
    written: list[tuple[str, Path]] = []
    if chrome_trace is None and memory_snapshot is None:
        return written
    from hardware_db.files import replace_bytes
    from planner.emit import viewers
    from planner.search.estimate import job_of

    job = job_of(request, plan.configuration)
    if chrome_trace is not None:
        replace_bytes(chrome_trace, viewers.chrome_trace(job, plan.memory).encode())
        written.append(("the step, for ui.perfetto.dev or chrome://tracing,", chrome_trace))
    if memory_snapshot is not None:
        replace_bytes(memory_snapshot, viewers.memory_snapshot(job, plan.memory))
        written.append(("the memory of a step, for pytorch.org/memory_viz,", memory_snapshot))
    return written


def recommend(
    model: ModelFlags,
    hardware: HardwareFlags,
    work: WorkFlags,
    ranking: RankingFlags,
    context: typer.Context,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Take the question from a trainer's config or script; flags override it. May be repeated: several"
            " files are one training.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Ranked plans for a model on your hardware. Exit status 1 if nothing fits."""
    from dsplan.question import Goal, Question
    from dsplan.render.recommendation import (
        recommendation_blocks,
        recommendation_to_dict,
        scaling_blocks,
        scaling_to_dicts,
    )
    from dsplan.render.show import say, show, show_json
    from planner.search.search import recommend as search

    goal = Goal(**{name: value for name, value in asdict(ranking).items() if name not in ("out", "plot")})
    flags = {**asdict(model), **asdict(hardware), **asdict(work)}
    requests = _of_config(context, config, flags, goal) if config else Question(**flags).requests(**goal.ranking())
    if len(requests) == 1:
        answer = search(requests[0], with_front=goal.pareto)
    else:
        from planner.search.rollouts import recommend_ways

        answer = recommend_ways(requests, with_front=goal.pareto)
    if ranking.out is not None:
        write_plans(answer.plans, ranking.out)
    rates = _scaling(answer) if ranking.plot else ()
    if json:
        show_json(recommendation_to_dict(answer) | ({"scaling": scaling_to_dicts(rates)} if ranking.plot else {}))
    else:
        show([*recommendation_blocks(answer), *(scaling_blocks(rates) if ranking.plot else ())])
        if ranking.out is not None and answer.plans:
            what = "1 plan and its" if len(answer.plans) == 1 else f"{len(answer.plans)} plans and their"
            say(f"{what} configs are in {ranking.out}")
    raise typer.Exit(not answer.plans)


def _of_config(context: typer.Context, paths: list[Path], flags: dict[str, Any], goal: Goal) -> tuple[Request, ...]:
    """Return the requests of a trainer's files, with what was taken from them among their remarks."""
    from dsplan.checking import question_of

    sources = {name: context.get_parameter_source(name) for name in flags}
    given = {name: flags[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    config = question_of(paths, given)
    requests = config.question.requests(config.facts, of_file="generations" not in given, **goal.ranking())
    return tuple(replace(request, defaults=(*config.remarks, *request.defaults)) for request in requests)


def _scaling(answer: Recommendation) -> tuple[Rate, ...]:
    """Return the fastest plans on fewer and more GPUs; none where nothing fits."""
    from planner.search.scaling import over_devices, rates

    return rates(over_devices(answer.request, answer.plans[0])) if answer.plans else ()


def maximum(
    model: ModelFlags, hardware: HardwareFlags, work: WorkFlags, configuration: MaximumFlags, json: JsonFlag = False
) -> None:
    """Find the largest micro-batch, longest sequence and largest model that fit. Exit status 1 if nothing does."""
    from dsplan.question import Question
    from dsplan.render.plan_view import maxima_blocks, maxima_to_dict
    from dsplan.render.show import show, show_json
    from planner.errors import ContradictoryRequest
    from planner.search.maximum import MaximumOptions, maxima

    if work.global_batch is not None:
        raise ContradictoryRequest(
            f"--global-batch {work.global_batch} says how large a step is, and max how large a micro-batch may be;"
            " leave it out"
        )
    request = Question(**asdict(model), **asdict(hardware), **asdict(work)).request()
    rows = maxima(request, MaximumOptions(**asdict(configuration)))
    if json:
        show_json(maxima_to_dict(request, rows))
    else:
        show(maxima_blocks(request, rows))
    raise typer.Exit(not any(row.micro_batch_size for row in rows))


def explain(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan that `recommend --out` or `estimate --out` wrote.")
    ],
    json: JsonFlag = False,
) -> None:
    """Show where bytes and seconds of a plan go. Also why the others lost."""
    from dsplan.render.plan_view import plan_blocks
    from dsplan.render.recommendation import alternatives_table
    from dsplan.render.show import show, show_json
    from planner.types.plan_io import load_plan, plan_to_dict

    loaded = load_plan(plan)
    if json:
        show_json(plan_to_dict(loaded))
    else:
        show([*plan_blocks(loaded), *alternatives_table(loaded)])


def emit(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan that `recommend --out` or `estimate --out` wrote.")
    ],
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="deepspeed, accelerate, huggingface, torchrun, slurm, mpi, kubernetes, skypilot, dstack,"
            " torchtitan, megatron, megatron-bridge, nemo, nanotron, axolotl, llama-factory, ms-swift, trl, torchtune,"
            " verl, openrlhf or nemo-rl.",
            show_default=False,
            autocompletion=among("planner.emit:FORMATS"),
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the files there; by default the first one is printed.")
    ] = None,
    nvme_path: Annotated[
        str, typer.Option(metavar="DIR", help="Where a plan with NVMe offload swaps to on every node.")
    ] = "/local_nvme",
    json: JsonFlag = False,
) -> None:
    """Write a plan as the config or launch script of another tool."""
    from dsplan.render.show import say, show_file, show_json
    from planner.emit import EmitOptions
    from planner.search.emitted import emit_priced
    from planner.types.plan_io import load_plan

    emitted = emit_priced(load_plan(plan), format, EmitOptions(nvme_path=nvme_path))
    files = emitted.files
    if out is not None:
        write_files(files, out)
    if json:
        show_json({"format": format, "files": files, "script": list(emitted.duties)})
        return
    if out is None:
        show_file(next(iter(files.values())))
    else:
        say("\n".join(str(out / name) for name in files))
    if emitted.duties:
        say("The plan holds for a script that", stderr=True)
    for duty in emitted.duties:
        say(f"  - {duty}", stderr=True)


# Plans and their configs as files of one directory.


def write_plans(plans: Sequence[Plan], directory: Path) -> None:
    """`plan-1.yaml` and in `plan-1/FORMAT/` its configs, and so on down the ranking.

    A plan for a trainer's code (`--code torchtitan`) has that trainer's config, or those of the other tools where the
    trainer lacks something of it. A format that has no form of a plan (FSDP as a DeepSpeed config) is left out.

    Raises:
        BrokenFile: the directory or a file cannot be written.
    """
    from planner.search.emitted import fitting_configs
    from planner.types.plan_io import save_plan

    for rank, plan in enumerate(plans, start=1):
        _make(directory)
        save_plan(plan, directory / f"plan-{rank}.yaml")
        for format, emitted in fitting_configs(plan).items():
            write_files(emitted.files, directory / f"plan-{rank}" / format)


def write_files(files: Mapping[str, str], directory: Path) -> None:
    """Files by name into a directory, which is made if need be; each is replaced in one step.

    Raises:
        BrokenFile: the directory or a file cannot be written.
    """
    from hardware_db.files import replace_text

    _make(directory)
    for name, text in files.items():
        replace_text(directory / name, text)


def _make(directory: Path) -> None:
    from hardware_db.errors import BrokenFile

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "give --out a directory you can write to"
        raise BrokenFile(directory, f"cannot be made ({error.strerror})", remedy) from error
