"""Predicts every published run from constants that have not seen its publication, and keeps the predictions.

    python -m scripts.fit.time_accuracy

Minutes long; `time_left_out.csv` holds what it finds and `accuracy_report.py` shows it. The free constants of
`time_constants.py` are fitted on the stated runs of all other publications; vTrain's grid, which is one publication, is
fitted on half of its model shapes and predicts the other half.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from hardware_db.files import replace_text
from planner.calibration.fit import Fit
from planner.cost.timing import step_time
from scripts.fit.published_rows import MEASUREMENTS, PublishedRun, published_runs
from scripts.fit.time_constants import Model, fitted, predicted
from scripts.fit.time_scores import Scored

PATH = MEASUREMENTS / "time_left_out.csv"
GRID = "vtrain_a100"
MOST_ROWS = 40
"""Runs of one publication that a fit takes, evenly spaced over its table: more would weigh no more, and take longer."""


def read_left_out() -> list[Scored]:
    """The kept predictions, in the order of the runs."""
    runs = {run.name: run for run in published_runs()}
    with PATH.open(newline="", encoding="utf-8") as lines:
        return [
            Scored(run=runs[row["run"]], predicted_seconds=float(row["left_out_seconds"]))
            for row in csv.DictReader(lines)
        ]


def left_out(runs: Sequence[PublishedRun]) -> list[Scored]:
    """Every run that is not of the grid, predicted from the stated runs of all other publications."""
    stated = seen_by_a_fit(runs)
    table = [run for run in runs if run.source != GRID]
    fits: dict[str, Fit] = {}
    scored: list[Scored] = []
    for document in dict.fromkeys(run.document for run in table):
        # A publication without a stated run leaves the fit as it is.
        absent = document if any(run.document == document for run in stated) else ""
        if absent not in fits:
            fits[absent] = fitted(Model([run for run in stated if run.document != document]))
        scored += _by(fits[absent], [run for run in table if run.document == document])
    return scored


def seen_by_a_fit(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The stated runs, at most MOST_ROWS of each publication."""
    documents: dict[str, list[PublishedRun]] = {}
    for run in runs:
        if run.reading == "stated":
            documents.setdefault(run.document, []).append(run)
    return [run for own in documents.values() for run in own[:: -(-len(own) // MOST_ROWS)]]


def halves(runs: Sequence[PublishedRun]) -> list[Scored]:
    """vTrain's grid, each half of its model shapes predicted from the other half."""
    grid = [run for run in runs if run.source == GRID]
    shapes = sorted({_shape(run) for run in grid})
    parts = [[run for run in grid if _shape(run) in shapes[start::2]] for start in (0, 1)]
    return _by(fitted(Model(parts[1])), parts[0]) + _by(fitted(Model(parts[0])), parts[1])


def _shape(run: PublishedRun) -> tuple[int, int, int]:
    facts = run.job.facts
    return facts.hidden_size, facts.num_layers, facts.num_heads


def _by(fit: Fit, runs: Sequence[PublishedRun]) -> list[Scored]:
    """Runs as constants predict them that were fitted to others."""
    return [Scored(run=run, predicted_seconds=s) for run, s in zip(runs, predicted(runs, fit), strict=True)]


def main() -> None:
    runs = list(published_runs())
    left_out_seconds = {row.run.name: row.predicted_seconds for row in left_out(runs) + halves(runs)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "left_out_seconds", "shipped_seconds"])
    for run in runs:
        shipped = step_time(run.job).step_seconds
        writer.writerow([run.name, f"{left_out_seconds[run.name]:.5g}", f"{shipped:.5g}"])
    replace_text(PATH, text.getvalue())


if __name__ == "__main__":
    main()
