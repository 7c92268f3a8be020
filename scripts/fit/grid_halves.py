"""Fits the time constants to half of the shapes of vTrain's grid, asks the other half, and keeps how far off that is.

    python -m scripts.fit.grid_halves

About a minute of one core. A shape is a model's width and depth, or that with the GPUs and the global batch; seeds draw
the halves, and each half is asked once. `grid_halves.csv` keeps the medians, `scripts/report/known_faults.py` shows
them.
"""

from __future__ import annotations

import csv
import io
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware_db.files import replace_text
from scripts.fit.published_rows import MEASUREMENTS, RECOMPUTED_FROM, PublishedRun, published_runs
from scripts.fit.time_accuracy import GRID
from scripts.fit.time_constants import Model, fitted, predicted

PATH = MEASUREMENTS / "grid_halves.csv"
SEEDS = 3
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """A half that was asked: `shape` says what a shape is, `median` is of |predicted / measured - 1| of the seconds.

    `recomputed` is the median of runs of 64 GPUs and more alone, None where the half has none.
    """

    shape: str
    seed: int
    fitted_runs: int
    asked_runs: int
    median: float
    bias: float
    recomputed: float | None


def model_shape(run: PublishedRun) -> Shape:
    """Width and depth."""
    return run.job.facts.hidden_size, run.job.facts.num_layers


def group_shape(run: PublishedRun) -> Shape:
    """The same with the GPUs and the global batch."""
    return (*model_shape(run), run.job.cluster.gpus, run.job.configuration.global_batch_size)


SHAPES: dict[str, Callable[[PublishedRun], Shape]] = {
    "width, depth": model_shape,
    "width, depth, GPUs, batch": group_shape,
}


def halves(grid: Sequence[PublishedRun]) -> Iterator[Half]:
    """Yield every half of every seed, each asked of what was fitted to the other."""
    for name, shape_of in SHAPES.items():
        for seed in range(SEEDS):
            shapes = sorted({shape_of(run) for run in grid})
            random.Random(seed).shuffle(shapes)
            first = frozenset(shapes[: len(shapes) // 2])
            parts = [run for run in grid if shape_of(run) in first], [run for run in grid if shape_of(run) not in first]
            for fit_to, tested in (parts, parts[::-1]):
                yield _half(name, seed, fit_to, tested)


def _half(name: str, seed: int, fit_to: Sequence[PublishedRun], tested: Sequence[PublishedRun]) -> Half:
    seconds = predicted(tested, fitted(Model(fit_to)))
    errors = [after / run.measured_seconds - 1 for after, run in zip(seconds, tested, strict=True)]
    large = [abs(e) for e, run in zip(errors, tested, strict=True) if run.job.cluster.gpus >= RECOMPUTED_FROM]
    return Half(
        shape=name,
        seed=seed,
        fitted_runs=len(fit_to),
        asked_runs=len(tested),
        median=statistics.median(map(abs, errors)),
        bias=statistics.median(errors),
        recomputed=statistics.median(large) if large else None,
    )


def read_halves(path: Path = PATH) -> list[Half]:
    """Return the halves that were kept."""
    with path.open(newline="", encoding="utf-8") as lines:
        return [_read(row) for row in csv.DictReader(lines)]


def _read(row: dict[str, str]) -> Half:
    counts = {name: int(row[name]) for name in ("seed", "fitted_runs", "asked_runs")}
    large = float(row["recomputed"]) if row["recomputed"] else None
    return Half(shape=row["shape"], **counts, median=float(row["median"]), bias=float(row["bias"]), recomputed=large)


def main() -> None:
    """Write the file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["shape", "seed", "fitted_runs", "asked_runs", "median", "bias", "recomputed"])
    for half in halves([run for run in published_runs() if run.source == GRID]):
        large = "" if half.recomputed is None else f"{half.recomputed:.4f}"
        figures = f"{half.median:.4f}", f"{half.bias:.4f}", large
        writer.writerow([half.shape, half.seed, half.fitted_runs, half.asked_runs, *figures])
    replace_text(PATH, text.getvalue())


if __name__ == "__main__":
    main()
