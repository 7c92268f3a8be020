"""Measures how far off the nearest memory form is where a model's own structure was never traced.

    python -m scripts.fit.nearest_forms

Every traced case is predicted with the forms of its structure left out, as a model from outside the catalogue would be,
and compared with its trace. `planner.cost.memory.overhead.NEAREST_FORM_ERROR` is read off the result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from planner.cost.memory import memory_estimate, timeline
from planner.cost.memory.activations import figures, form
from planner.cost.memory.activations.form import structure_of
from scripts.report.accuracy_cases import Case, all_cases, traced_peak


def left_out() -> Iterator[float]:
    """Signed errors of the peak; a case whose kind of model has no other form at all is skipped."""
    for case in all_cases():
        if case.truth == "traced":
            try:
                yield _error(case)
            except LookupError:
                continue


def _error(case: Case) -> float:
    files: Any = form
    read_file, own = files._file, structure_of(case.job.facts)
    files._file = lambda model_type: [entry for entry in read_file(model_type) if entry["structure"] != own]
    _forget()
    try:
        return traced_peak(memory_estimate(case.job), case.job) / case.measured - 1
    finally:
        files._file = read_file
        _forget()


def _forget() -> None:
    figures._catalogued_figures.cache_clear()
    timeline._instants.cache_clear()
    timeline._CACHE.clear()


def main() -> None:
    errors = sorted(left_out())
    below = -errors[len(errors) // 20]
    median = statistics.median(map(abs, errors))
    print(f"{len(errors)} cases: median {median:.1%}; one in twenty is {below:.1%} under or more, one {-errors[0]:.0%}")


if __name__ == "__main__":
    main()
