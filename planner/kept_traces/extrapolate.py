"""A reading at sizes that were never traced, from traces at others.

The storages of a step are products of dimensions, so what is alive at one moment is affine in the samples of a
micro-batch (from two on: a dimension of one makes copies into views) and at most quadratic in the sequence length
(attention that is not fused). A peak is the largest of such moments, and another moment may become the largest between
two sizes, or a window of local attention may begin to bind. The closed forms know both, so a reading is extrapolated
only where the same extrapolation of the closed forms arrives at the closed forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from planner.kept_traces.reading import Reading, Sizes
from planner.memory.ledger import Ledger

AGREEMENT = 0.005
"""Share of a phase by which extrapolated and direct closed forms, or traces, may differ."""
FEWEST_SAMPLES = 2

Phases = Mapping[str, Ledger]
_CATEGORIES = tuple(item.name for item in fields(Ledger))
_POINTS = {"micro_batch": 2, "sequence": 3}


def extrapolated(readings: Sequence[Reading], sizes: Sizes, closed: Callable[[Sizes], Phases]) -> Reading | None:
    """The reading at `sizes`; None where the traces there do not allow it. `closed` gives closed forms by sizes."""
    for axis, points in _POINTS.items():
        known = _along(axis, readings, sizes)
        target: int = getattr(sizes, axis)
        nearest = sorted(known, key=lambda at: (abs(at - target), at))
        used, checks = nearest[:points], nearest[points:]
        if len(used) < points:
            continue
        curve = _Curve({at: known[at].phases for at in used})
        shape = _Curve({at: closed(known[at].sizes) for at in used})
        on_curve = all(_agree(curve.at(at), known[at].phases) for at in checks)
        if on_curve and _agree(shape.at(target), closed(sizes)):
            taken_from = tuple(sorted(known[at].sizes for at in used))
            return Reading(sizes=sizes, phases=curve.at(target), taken_from=taken_from)
    return None


def _along(axis: str, readings: Sequence[Reading], sizes: Sizes) -> dict[int, Reading]:
    """By its size along the axis, the readings that differ from `sizes` in nothing else."""
    changes = {axis: getattr(sizes, axis)}
    known = {getattr(one.sizes, axis): one for one in readings if replace(one.sizes, **changes) == sizes}
    fewest = FEWEST_SAMPLES if axis == "micro_batch" else 1
    return {at: one for at, one in known.items() if min(at, changes[axis]) >= fewest}


class _Curve:
    """The polynomial of least degree through the phases at some sizes (Lagrange)."""

    def __init__(self, known: Mapping[int, Phases]) -> None:
        self._known = known

    def at(self, size: int) -> dict[str, Ledger]:
        weights = {at: self._weight(at, size) for at in self._known}
        phases = next(iter(self._known.values()))
        return {
            name: Ledger(**{category: self._sum(weights, name, category) for category in _CATEGORIES})
            for name in phases
        }

    def _weight(self, at: int, size: int) -> float:
        weight = 1.0
        for other in self._known:
            if other != at:
                weight *= (size - other) / (at - other)
        return weight

    def _sum(self, weights: Mapping[int, float], phase: str, category: str) -> float:
        total = 0.0
        for at, weight in weights.items():
            total += weight * getattr(self._known[at][phase], category)
        return max(total, 0.0)


def _agree(one: Phases, other: Phases) -> bool:
    """Whether two sets of phases are the same but for rounding; phases that only one has are not compared."""
    return all(
        abs(ledger.total - other[name].total) <= AGREEMENT * other[name].total
        for name, ledger in one.items()
        if name in other
    )
