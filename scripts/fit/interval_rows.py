"""Published runs as intervals are fitted to them and held against them: what each is off by, and what it is like.

`interval_rows.csv` has a row for each run of `published_asked.csv` that prints a speed or its memory, at most MOST_ROWS
of one publication and code base, and for some of them a row for every other code base that can do the same work: what
is predicted where neither runs of the code base nor its traits were seen. Times are those of constants that have not
seen the publication, the code base, the architecture or the size.

    python -m scripts.fit.interval_rows

fits those constants anew, asks every question and writes the file; minutes long.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar, cast, get_args

from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from planner.calibration.fit import Fit
from planner.cost.code_bases import code_names, of_any_year
from planner.cost.intervals import Regime, Stratum, stratum_of
from planner.cost.memory.allocator import SEGMENT_BYTES
from planner.cost.memory.overhead import FRAGMENTATION_UPPER
from planner.cost.timing import step_time
from planner.search.estimate import job_of
from planner.types.plan import MemoryEstimate
from scripts.fit.asked import Desk, PublishedQuestion, questions
from scripts.fit.published_code import UNPADDED
from scripts.fit.published_rows import MEASUREMENTS, PublishedRun, published_runs
from scripts.fit.time_accuracy import GRID, read_left_out
from scripts.fit.time_constants import Model, fitted, predicted

ROWS = MEASUREMENTS / "interval_rows.csv"
Axis = Literal["publication", "code base", "device", "larger model", "smaller model", "more GPUs", "fewer GPUs"]
"""What is left out: of the first three each in turn, of sizes all but the third at the other end."""
AXES: tuple[Axis, ...] = get_args(Axis)
Item = TypeVar("Item")

MOST_ROWS = 40
"""Rows of one publication and code base, evenly spaced over its tables."""
FITTED_ROWS = 10
"""Of a publication, what constants are fitted to anew, and what is predicted with them: more would weigh no more."""
CROWDED = 0.75
"""Share of a device's memory from which on the allocator has begun to give its cache back: it holds up to a third of
what is allocated and more (`planner.cost.memory.allocator.CACHE`)."""
MOST_CROSSED = 6
"""Of those, the ones that are asked under other code bases as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run under the traits of a code base: logarithms of measured over predicted, NaN where nothing was printed.

    `memory` is the headroom over what is needed that an upper bound has to have, `room` that of runs whose figure holds
    no cache that would have made room.
    """

    case: str
    publication: str
    reading: str
    code: str
    """Whose code ran."""
    under: str
    """The code base that it was predicted as."""
    stratum: Stratum
    time: Mapping[Axis, float]
    """By what the constants have not seen."""
    shipped: float
    """Of times, with the constants that are shipped."""
    memory: float
    room: float

    @property
    def is_own(self) -> bool:
        """Return whether it was predicted as the code that ran."""
        return self.code == self.under


def base_of(code: str) -> str:
    """A code base whatever its version; vTrain's own file is Megatron-DeepSpeed's."""
    return "megatron-deepspeed" if code == str(UNPADDED) else of_any_year(code)


def needed_bytes(memory: MemoryEstimate, kind: str) -> float:
    """Return what is needed, without what a printed figure of this kind does not hold: the context and the
    communicators, and segments that are not full. A figure of unknown kind is taken for what nvidia-smi shows."""
    tensors = memory.peak_allocated_bytes * (1 + FRAGMENTATION_UPPER)
    return {"allocated": tensors, "reserved": tensors + SEGMENT_BYTES}.get(kind, memory.device_needed_bytes)


def headroom(measured_bytes: float, memory: MemoryEstimate, kind: str) -> float:
    """The logarithm of what a run took over what it is said to need.

    At most 0 for a run that stays below what is said to be used, the allocator's cache included: a bound is never less.
    """
    used = {"allocated": 0, "reserved": memory.peak_reserved_bytes}.get(kind, memory.device_used_bytes)
    beyond = math.log(measured_bytes / needed_bytes(memory, kind))
    return min(0.0, beyond) if measured_bytes <= used else beyond


def size_of(axis: Axis, parameters: int, gpus: int) -> int:
    """Of a run, so that it grows towards what is left out."""
    size = parameters if axis.endswith("model") else gpus
    return -size if axis in ("smaller model", "fewer GPUs") else size


def near_and_far(sizes: Iterable[int]) -> tuple[int, int]:
    """The largest size of the lower third of sizes, and the smallest of the upper third."""
    ordered = sorted(sizes)
    return ordered[len(ordered) // 3], ordered[-(len(ordered) // 3) - 1]


class Constants:
    """Predicted times of the runs that constants are fitted to, under constants that have not seen them."""

    def __init__(self) -> None:
        groups: defaultdict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
        for run in published_runs():
            groups[run.document, run.job.cluster.device.architecture].append(run)
        self._runs = tuple(run for group in groups.values() for run in _spread_evenly(group, FITTED_ROWS))
        self._shipped = [step_time(run.job).step_seconds for run in self._runs]
        self._fits: dict[tuple[str, ...], Fit] = {}

    def moves(self, axis: Axis) -> Mapping[tuple[str, str], float]:
        """Return what leaving its fold out makes of predicted times: median logarithms by publication and architecture.

        Those of an architecture, whatever the publication, have the name "".
        """
        moved: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for run, shipped, seconds in zip(self._runs, self._shipped, self._left_out(axis), strict=True):
            architecture = run.job.cluster.device.architecture
            for name in (run.document, ""):
                moved[name, architecture].append(math.log(seconds / shipped))
        return {key: statistics.median(changes) for key, changes in moved.items()}

    def _left_out(self, axis: Axis) -> Sequence[float]:
        """Seconds of every run. vTrain's grid is in no fit but its own: of what else is left out it is not part."""
        if axis == "publication":
            left = {row.run.name: row.predicted_seconds for row in read_left_out()}
            return [left[run.name] for run in self._runs]
        stated = [run for run in self._runs if run.source != GRID and run.reading == "stated"]
        if axis in ("code base", "device"):
            folds = {run.name: _fold(axis, run) for run in self._runs}
            left = {}
            for fold in sorted({*folds.values()}):
                constants = self._fitted_to([run for run in stated if folds[run.name] != fold])
                test = [run for run in self._runs if folds[run.name] == fold]
                left.update(zip((run.name for run in test), predicted(test, constants), strict=True))
            return [left[run.name] for run in self._runs]
        sizes = {run.name: size_of(axis, run.job.facts.parameters, run.job.cluster.gpus) for run in stated}
        near, _ = near_and_far(sizes.values())
        return predicted(self._runs, self._fitted_to([run for run in stated if sizes[run.name] <= near]))

    def _fitted_to(self, runs: Sequence[PublishedRun]) -> Fit:
        names = tuple(run.name for run in runs)
        if names not in self._fits:
            self._fits[names] = fitted(Model(runs))
        return self._fits[names]


def _fold(axis: Axis, run: PublishedRun) -> str:
    return run.job.cluster.device.architecture if axis == "device" else base_of(run.job.workload.code)


def rows() -> Iterator[Row]:
    """Every row, worked out anew."""
    constants = Constants()
    moves = {axis: constants.moves(axis) for axis in AXES}
    with TemporaryDirectory() as directory:
        desk = Desk(Path(directory))
        for own in _by_publication(questions()).values():
            taken = _spread_evenly(own, MOST_ROWS)
            crossed = _spread_evenly(taken, MOST_CROSSED)
            for run in taken:
                yield from _rows_of(desk, run, moves, is_crossed=run in crossed)


def _by_publication(runs: Iterable[PublishedQuestion]) -> Mapping[tuple[str, str], list[PublishedQuestion]]:
    groups: defaultdict[tuple[str, str], list[PublishedQuestion]] = defaultdict(list)
    for one in runs:
        has_figure = one.tokens_per_s_per_gpu or one.memory_bytes
        if one.ran and has_figure and not one.why_not and one.reading != "disclaimed":
            groups[one.publication, base_of(one.code)].append(one)
    return groups


def _spread_evenly(rows: Sequence[Item], most: int) -> Sequence[Item]:
    return rows[:: -(-len(rows) // most)]


def _rows_of(
    desk: Desk, run: PublishedQuestion, moves: Mapping[Axis, Mapping[tuple[str, str], float]], *, is_crossed: bool
) -> Iterator[Row]:
    code = base_of(run.code)
    others = [name for name in code_names() if name == of_any_year(name) != code] if is_crossed else []
    for under in (run.code, *others):
        try:
            request, plan = desk.priced(replace(run, code=under))
        except DsplanError:
            continue  # that code base does not do such work
        stratum = stratum_of(job_of(request, plan.configuration))
        speed = run.tokens_per_s_per_gpu / plan.throughput.tokens_per_second_per_gpu
        off = -math.log(speed) if speed else math.nan
        memory = headroom(run.memory_bytes, plan.memory, run.kind) if run.memory_bytes else math.nan
        is_crowded = run.kind == "allocated" or run.memory_bytes > CROWDED * request.cluster.capacity_bytes
        yield Row(
            case=run.case,
            publication=run.publication,
            reading=run.reading,
            code=code,
            under=base_of(under),
            stratum=replace(stratum, code=code),
            time={axis: off - _move(moves[axis], axis, run, stratum) for axis in AXES},
            shipped=off,
            memory=memory,
            room=memory if is_crowded else math.nan,
        )


def _move(moves: Mapping[tuple[str, str], float], axis: Axis, run: PublishedQuestion, stratum: Stratum) -> float:
    """Of a publication that no constant saw: what those of its device move by, where these were left out."""
    own = moves.get((run.publication, stratum.architecture))
    if own is None and axis not in ("publication", "code base"):
        own = moves.get(("", stratum.architecture))
    return own or 0.0


_TEXTS = ("case", "publication", "reading", "code", "under")
_STRATUM = tuple(item.name for item in fields(Stratum) if item.name != "code")


def _column(axis: Axis) -> str:
    return f"without {axis}"


def written(listed: Iterable[Row]) -> str:
    """Rows as the text of their file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_TEXTS, *_STRATUM, *map(_column, AXES), "shipped", "memory", "room"])
    for row in listed:
        figures = [*(row.time[axis] for axis in AXES), row.shipped, row.memory, row.room]
        cells = ["" if math.isnan(value) else f"{value:.4f}" for value in figures]
        writer.writerow(
            [*(getattr(row, name) for name in _TEXTS), *(getattr(row.stratum, name) for name in _STRATUM), *cells]
        )
    return text.getvalue()


def read_rows(path: Path = ROWS) -> list[Row]:
    """The rows of the file."""
    with path.open(newline="", encoding="utf-8") as lines:
        return [_read(cells) for cells in csv.DictReader(lines)]


def _read(cells: Mapping[str, str]) -> Row:
    return Row(
        **{name: cells[name] for name in _TEXTS},
        stratum=Stratum(
            regime=cast("Regime", cells["regime"]),
            code=cells["code"],
            architecture=cells["architecture"],
            parameters=int(cells["parameters"]),
            gpus=int(cells["gpus"]),
        ),
        time={axis: float(cells[_column(axis)] or "nan") for axis in AXES},
        shipped=float(cells["shipped"] or "nan"),
        memory=float(cells["memory"] or "nan"),
        room=float(cells["room"] or "nan"),
    )


def main() -> None:
    replace_text(ROWS, written(rows()))


if __name__ == "__main__":
    main()
