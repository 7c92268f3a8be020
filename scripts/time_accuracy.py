"""Prints how far the time model is from published runs when each publication in turn is left out of its fit.

    python scripts/time_accuracy.py

Minutes long. The free constants of `time_constants.py` are fitted on all other publications and score the one that was
left out; vTrain's grid is fitted on half of its model shapes and scored on the other half.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_rows import PublishedRun, published_runs
from time_constants import Model, fitted, predicted
from time_scores import Choice, Scored, choices, errors, percentile

GRID = "vtrain_a100"
GRID_ROWS = 8
"""Every eighth run of vTrain's grid takes part where another publication is left out."""


def scored(runs: Sequence[PublishedRun], seconds: Sequence[float]) -> list[Scored]:
    """Runs with predictions for them."""
    return [Scored(run=run, predicted_seconds=s) for run, s in zip(runs, seconds, strict=True)]


def left_out(runs: Sequence[PublishedRun]) -> list[Scored]:
    """Every run that is not of the grid, predicted from the stated runs of all other publications."""
    grid = [run for run in runs if run.source == GRID][::GRID_ROWS]
    table = [run for run in runs if run.source != GRID]
    found: list[Scored] = []
    for document in dict.fromkeys(run.document for run in table):
        own = [run for run in table if run.document == document]
        others = [run for run in table if run.document != document and run.reading == "stated"]
        found += scored(own, predicted(own, fitted(Model(others + grid))))
    return found


def shape(run: PublishedRun) -> tuple[int, int, int]:
    facts = run.job.facts
    return facts.hidden_size, facts.num_layers, facts.num_heads


def halves(runs: Sequence[PublishedRun]) -> list[Scored]:
    """vTrain's grid, each half of its model shapes predicted from the other half."""
    grid = [run for run in runs if run.source == GRID]
    shapes = sorted({shape(run) for run in grid})
    parts = [[run for run in grid if shape(run) in shapes[start::2]] for start in (0, 1)]
    found: list[Scored] = []
    for own, other in (parts, parts[::-1]):
        found += scored(own, predicted(own, fitted(Model(other))))
    return found


def score_line(name: str, rows: Sequence[Scored]) -> str:
    all_errors = errors(rows)
    return f"{name:44} {all_errors.runs:4} {all_errors.median:7.1%} {all_errors.p90:7.1%} {all_errors.bias:+7.1%}"


def choice_lines(found: Sequence[Choice]) -> Iterator[str]:
    """Groups, median correlation, and losses of the plan put first: median, worst tenth."""
    for source in ("all", *dict.fromkeys(choice.source for choice in found)):
        own = [choice for choice in found if source in ("all", choice.source)]
        ranked = [choice.correlation for choice in own if choice.correlation is not None]
        order = f"{statistics.median(ranked):.2f} over {len(ranked)}" if ranked else "-"
        losses = [choice.loss for choice in own]
        yield f"{source:28} {len(own):3} groups, correlation {order:14} loss {_losses(losses)}"


def _losses(losses: Iterable[float]) -> str:
    found = list(losses)
    return f"median {statistics.median(found):.1%}, worst tenth {percentile(found, 0.9):.1%}"


def report(runs: Sequence[PublishedRun]) -> Iterator[str]:
    table = left_out(runs)
    stated = [row for row in table if row.run.reading == "stated"]
    yield f"{'':44} {'runs':>4} {'median':>7} {'p90':>7} {'bias':>7}"
    for (source, reading), rows in _by_source(table).items():
        yield score_line(f"{source} ({reading})", rows)
    yield score_line("all stated rows", stated)
    yield score_line("with disclaimed rows", [r for r in table if r.run.reading in ("stated", "disclaimed")])
    grid = halves(runs)
    yield score_line("vTrain, other half of shapes", grid)
    yield from choice_lines(choices(stated))
    yield from choice_lines(choices(grid))


def _by_source(rows: Sequence[Scored]) -> dict[tuple[str, str], list[Scored]]:
    found: dict[tuple[str, str], list[Scored]] = {}
    for row in rows:
        found.setdefault((row.run.source, row.run.reading), []).append(row)
    return found


if __name__ == "__main__":
    for line in report(list(published_runs())):
        print(line, flush=True)
