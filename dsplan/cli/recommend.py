"""`dsplan recommend`: ranked plans."""

from __future__ import annotations

from dataclasses import asdict

import typer

from dsplan.cli.flags import HardwareFlags, JsonFlag, ModelFlags, RankingFlags, WorkFlags, with_flags


@with_flags
def recommend(
    model: ModelFlags, hardware: HardwareFlags, work: WorkFlags, ranking: RankingFlags, json: JsonFlag = False
) -> None:
    """Ranked plans for a model on your hardware. Exit status 1 if nothing fits."""
    from dsplan.goal import Goal
    from dsplan.question import Question
    from dsplan.render.recommendation import recommendation_blocks, recommendation_to_dict
    from dsplan.render.show import show, show_json
    from planner.search.search import recommend as search

    question = Question(**asdict(model), **asdict(hardware), **asdict(work))
    goal = Goal(**{name: value for name, value in asdict(ranking).items() if name != "out"})
    answer = search(question.request(**goal.ranking()), with_front=goal.pareto)
    if ranking.out is not None:
        from dsplan.cli.plan_files import write_plans

        write_plans(answer.plans, ranking.out)
    if json:
        show_json(recommendation_to_dict(answer))
    else:
        show(recommendation_blocks(answer))
        if ranking.out is not None and answer.plans:
            typer.echo(f"{len(answer.plans)} plans and their configs are in {ranking.out}")
    raise typer.Exit(not answer.plans)
