"""`dsplan bench`: what this machine can do, measured and remembered."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import HardwareFlags, JsonFlag, number
from planner import limits


def bench(
    hardware: HardwareFlags,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]",
            help="Processes at work at once, one number or several; by default two without a GPU, else 1, 2, 4 and so"
            " on to all.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the few rates that a first plan needs.")] = False,
    minutes: Annotated[
        float | None, number(limits.BENCH_MINUTES, "Begin nothing new after M minutes; the next call continues.", "M")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND]",
            help="Only these: matmul, attention, memory, host-link, collectives, optimizer, disk, training.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure the shapes of this model's layers, and train it.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is in the database.")] = False,
    generate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing; write what would be measured, here or on the hardware that is named, to this file.",
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Measure what this file says.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure this machine: matrix products, attention, memory, links, collectives, optimizer, disk, training.

    Every result is stored at once, so a benchmark that was stopped resumes where it was. Later predictions use it.
    """
    from dsplan.diagnostics.bench.benchmark import BenchQuestion, plan_of, run_plan
    from dsplan.diagnostics.bench.plan import save_bench_plan
    from dsplan.render.bench_view import BenchView, report_blocks, report_to_dict
    from dsplan.render.show import say, show, show_json

    question = BenchQuestion(
        **asdict(hardware),
        ranks=ranks,
        quick=quick,
        minutes=minutes,
        only=only,
        model=model,
        again=again,
        plan=plan,
        generate=generate is not None,
    )
    wanted = plan_of(question)
    if generate is not None:
        save_bench_plan(wanted, generate)
        text = f"{len(wanted.points)} points and {len(wanted.training)} training runs written to {generate}"
        if json:
            show_json({"file": str(generate), "points": len(wanted.points), "training": len(wanted.training)})
        else:
            say(f"{text}; run them on {wanted.device} with `dsplan bench --plan {generate}`")
        return
    try:
        with BenchView(out=sys.stderr if json else sys.stdout, lines=not json) as view:
            report = run_plan(wanted, question, view.show)
    except KeyboardInterrupt:
        say("stopped; what was measured is stored, and the same command resumes from there", stderr=True)
        raise typer.Exit(130) from None
    if json:
        show_json(report_to_dict(report))
    else:
        show(report_blocks(report))
    raise typer.Exit(report.exit_code)
