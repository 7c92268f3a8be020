"""Derive the memory form of an architecture from one small symbolic step.

The form says what every block keeps, what the parts before and behind the blocks keep, and which moments inside each
part can be a peak: each as a polynomial in the dimensions of model and batch (`planner.cost.memory.activations.form`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost.memory.activations.dimensions import Dimensions
from planner.cost.memory.activations.form import (
    BlockForm,
    Form,
    Moment,
    Polynomial,
    add,
    scale,
    subtract,
    value,
)
from strategies.tracing.forms.timeline import Storage, Timeline

_TOLERANCE = 0.002
"""A moment is left out where another is within this share of it."""
_WEIGHTS = ((2.0, 0.0), (4.0, 1.0), (0.0, 0.0), (6.0, 0.0))
"""Bytes per element of a gradient, and whether cast copies count, as strategies have it."""


def prune_moments(points: Sequence[Dimensions], moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Return the fewest moments that come within 0.2 % of the largest at every point."""
    pool = list({str((m.activations, m.cast, m.gradients)): m for m in moments}.values())
    terms = {term for moment in pool for part in _parts(moment) for term in part}
    rows = []
    for point in points:
        worth = {term: value({term: 1.0}, point) for term in terms}
        sizes = [tuple(_size(part, worth) for part in _parts(moment)) for moment in pool]
        rows += [
            [activations + on * cast + per_element * gradients for activations, cast, gradients in sizes]
            for per_element, on in _WEIGHTS
        ]
    return tuple(pool[index] for index in sorted(_cover(rows, len(pool))))


def _parts(moment: Moment) -> tuple[Polynomial, ...]:
    return moment.activations, moment.cast, moment.gradients


def _size(polynomial: Polynomial, worth: dict[str, float]) -> float:
    return sum(coefficient * worth[term] for term, coefficient in polynomial.items())


def _cover(rows: list[list[float]], count: int) -> set[int]:
    """Greedy: the moment that is good enough in most of the rows not yet covered, until all are."""
    good = [
        {index for index in range(count) if row[index] >= max(row) - _TOLERANCE * abs(max(row))} for row in rows if row
    ]
    chosen: set[int] = set()
    while good:
        votes = [sum(index in row for row in good) for index in range(count)]
        best = votes.index(max(votes))
        chosen.add(best)
        good = [row for row in good if best not in row]
    return chosen


PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "dot_product")
GROUPED_PRODUCT = "aten._grouped_mm."
"""Operations whose outputs selective checkpointing keeps; the last only where no bias is added to it in place."""


@dataclass(frozen=True, slots=True)
class _Alive:
    """Memory at one moment: activations, cast copies of weights (bytes), gradients of weights (elements)."""

    activations: Polynomial
    cast: Polynomial
    gradients: Polynomial

    def less(self, other: _Alive) -> _Alive:
        return _Alive(
            subtract(self.activations, other.activations),
            subtract(self.cast, other.cast),
            subtract(self.gradients, other.gradients),
        )

    def more(self, activations: Polynomial, cast: Polynomial) -> _Alive:
        return replace(self, activations=add((self.activations, activations)), cast=add((self.cast, cast)))

    def moment(self) -> Moment:
        return Moment(activations=self.activations, cast=self.cast, gradients=self.gradients)


class Derivation:
    """Reads a timeline, whose blocks have the kinds `labels`, into a form.

    `elements` turns a storage's shape into a polynomial, `points` are sizes at which a moment may be the peak.
    `asks_for_biases`: under checkpointing what the first block hands on has a gradient, and stays beside what it makes
    when it is run again.
    """

    def __init__(
        self,
        timeline: Timeline,
        labels: Sequence[str],
        elements: Callable[[tuple[int, ...]], Polynomial],
        points: Sequence[Dimensions],
        *,
        keeps_grouped: bool = True,
        asks_for_biases: bool = False,
    ) -> None:
        self._timeline, self._labels, self._decode = timeline, labels, elements
        self._points = points
        self._products_of = (*PRODUCTS, GROUPED_PRODUCT) if keeps_grouped else PRODUCTS
        self._asks_for_biases = asks_for_biases
        self._elements = [elements(storage.shape) for storage in timeline.storages]
        self._made = sorted({storage.made for storage in timeline.storages})

    def form(self) -> Form:
        """Return the memory form of the step."""
        marks, last = self._timeline.marks, len(self._labels) - 1
        start = self._settled(marks["enter0"])
        blocks: dict[str, BlockForm] = {}
        in_front: dict[str, _Alive] = {}
        before = start
        for index, label in enumerate(self._labels):
            if label in blocks:
                # As the form has it: what the last blocks keep less than others is seen in the moments after them.
                before = before.more(blocks[label].kept, blocks[label].cast)
                continue
            in_front.setdefault(label, before)
            if index == self._representative(label):
                blocks[label] = self._block(index, before, in_front[label])
            before = self._settled(marks[f"leave{index}"])
        forward = self._moments(marks[f"leave{last}"], marks["loss"], before)
        backward = self._moments(marks["loss"], marks[f"back{last}"], before)
        table = self._moments(marks["back_first"], marks["end"], start)
        inputs = self._bytes(self._timeline.inputs)
        return Form(
            blocks=blocks,
            buffers=self._bytes(self._timeline.outside),
            before=replace(start.moment(), activations=add((start.activations, inputs))),
            loss=prune_moments(self._points, forward),
            loss_backward=prune_moments(self._points, backward),
            table_backward=prune_moments(self._points, table),
        )

    def _representative(self, label: str) -> int:
        """Return the second block of a kind where there are three: the first and the last may differ."""
        places = [index for index, name in enumerate(self._labels) if name == label]
        return places[min(1, len(places) - 1)]

    def _block(self, index: int, before: _Alive, in_front: _Alive) -> BlockForm:
        marks = self._timeline.marks
        enter, leave = marks[f"enter{index}"], marks[f"leave{index}"]
        kept = self._settled(leave).less(before)
        ends = marks[f"back{index - 1}"] if index else marks["back_first"]
        needed = self._last_needed(enter, leave, index)
        again = self._moments(enter, needed, before)
        return BlockForm(
            kept=kept.activations,
            cast=kept.cast,
            buffers=self._bytes(self._timeline.buffers[index]),
            boundary=self._size(self._timeline.outputs[index]),
            input=self._forgotten_input(index),
            products=self._products(enter, leave),
            unused=self._products(needed, leave),
            **self._once(index, kept, in_front),
            forward=prune_moments(self._points, self._moments(enter, leave, before)),
            backward=prune_moments(self._points, self._moments(marks[f"back{index}"], ends, before)),
            recomputed=prune_moments(self._points, again),
            replayed=prune_moments(
                self._points, [self._beside_products(moment, leave, before) for moment in self._within(enter, needed)]
            ),
        )

    def _once(self, index: int, kept: _Alive, in_front: _Alive) -> dict[str, Polynomial]:
        """Return what the first block of a kind keeps beyond what this one does, over what was there `in_front`."""
        first = self._labels.index(self._labels[index])
        if first == index:
            return {}
        marks = self._timeline.marks
        enter, leave = marks[f"enter{first}"], marks[f"leave{first}"]
        earlier = marks[f"leave{first - 1}"] if first else enter
        between = [
            freed for freed in self._timeline.storages if earlier < freed.made <= enter and freed.outlives(enter)
        ]
        given = [
            (storage, has_gradient)
            for storage, has_gradient in self._timeline.given[index]
            if storage.made > marks["enter0"] and storage not in self._timeline.outputs
        ]
        inside = [storage for storage, _ in given if enter < storage.made <= leave]
        own = self._made_and_kept(marks[f"enter{index}"], marks[f"leave{index}"])
        without_gradient = [storage for storage, has_gradient in given if self._asks_for_biases and not has_gradient]
        return {
            "once": subtract(self._settled(leave).less(in_front).activations, kept.activations),
            "handed": add(map(self._size, (*between, *inside))),
            "waiting": add(self._size(storage) for storage, has_gradient in given if has_gradient),
            "again": add(
                (
                    subtract(self._made_and_kept(enter, leave), add((own, *map(self._size, inside)))),
                    *(scale(self._size(storage), 2) for storage in without_gradient if storage in inside),
                )
            ),
        }

    def _made_and_kept(self, enter: int, leave: int) -> Polynomial:
        """Bytes of what a block made and left alive."""
        kept = self._numbered(
            lambda storage: storage.made > enter and storage.outlives(leave) and not storage.copies_weight
        )
        return add(scale(elements, storage.item_bytes) for storage, elements in kept)

    def _last_needed(self, enter: int, leave: int, index: int) -> int:
        """Return when a block that runs again has made the last tensor its backward needs; torch stops it there."""
        output = self._timeline.outputs[index]
        moments = [
            storage.made
            for storage in self._timeline.storages
            if enter < storage.made and storage.outlives(leave) and storage is not output
        ]
        return max(moments, default=leave)

    def _beside_products(self, moment: int, leave: int, before: _Alive) -> Moment:
        """Return a moment of a block that is run again, with the products that it will be given later."""
        alive = self._alive(moment).less(before).moment()
        return replace(alive, activations=add((alive.activations, self._products(moment, leave))), gradients={})

    def _bytes(self, tensors: Iterable[tuple[tuple[int, ...], int]]) -> Polynomial:
        return add(scale(self._decode(shape), item_bytes) for shape, item_bytes in tensors)

    def _products(self, start: int, end: int) -> Polynomial:
        """Bytes of the products made after `start` up to `end`."""
        products = self._numbered(
            lambda storage: (
                start < storage.made <= end
                and any(name in storage.operation for name in self._products_of)
                and "backward" not in storage.operation
            )
        )
        return add(scale(elements, storage.item_bytes) for storage, elements in products)

    def _within(self, start: int, end: int) -> list[int]:
        """Return when something was made, after `start` up to `end`."""
        return [moment for moment in self._made if start < moment <= end]

    def _moments(self, start: int, end: int, base: _Alive) -> list[Moment]:
        """Return every moment after `start` up to `end`, over `base`, with the gradients made since."""
        base = replace(base, gradients=self._alive(start).gradients)
        return [self._alive(moment).less(base).moment() for moment in self._within(start, end)]

    def _size(self, storage: Storage) -> Polynomial:
        return scale(self._decode(storage.shape), storage.item_bytes)

    def _forgotten_input(self, index: int) -> Polynomial:
        """Bytes of a block's input that only checkpointing keeps to the block's backward."""
        given = self._timeline.outputs[index - 1] if index else None
        return {} if given is None or given.lives_at(self._timeline.marks["loss"]) else self._size(given)

    def _alive(self, moment: int) -> _Alive:
        return self._sum(lambda storage: storage.lives_at(moment))

    def _settled(self, moment: int) -> _Alive:
        return self._sum(lambda storage: storage.outlives(moment))

    def _sum(self, counts: Callable[[Storage], bool]) -> _Alive:
        parts: tuple[list[Polynomial], list[Polynomial], list[Polynomial]] = ([], [], [])
        for storage, elements in self._numbered(counts):
            if storage.gradient:
                parts[2].append(elements)
            else:
                parts[1 if storage.copies_weight else 0].append(scale(elements, storage.item_bytes))
        return _Alive(*(add(part) for part in parts))

    def _numbered(self, counts: Callable[[Storage], bool]) -> Iterator[tuple[Storage, Polynomial]]:
        """Yield the storages that count, and their elements."""
        every = zip(self._timeline.storages, self._elements, strict=True)
        return ((storage, elements) for storage, elements in every if counts(storage))
