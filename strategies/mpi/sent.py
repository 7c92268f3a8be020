"""The leaves of a tree that all ranks are about to send, agreed upon before the first message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strategies.errors import CannotRun
from strategies.mpi.arrays import Array, Form, form_of, values_of
from strategies.mpi.buckets import Bucket
from strategies.mpi.tree import Path, Tree, leaves, name_of
from strategies.mpi.wire import Wire

Words = dict[str, Form | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A leaf. `value` is None where this rank has none, `form` where no rank has one; `absent`: the ranks without."""

    path: Path
    value: Any
    form: Form | None
    absent: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return name_of(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """What is done (for messages), what else all ranks must say, and the conditions on arguments and on each leaf."""

    action: str
    also: str = ""
    check: Callable[[], None] = lambda: None
    require: Callable[[Path, Form], None] = lambda _path, _form: None


def agreed_leaves(wire: Wire, tree: Tree, sending: Sending) -> list[Sent]:
    """The leaves in the order of all ranks. A leaf may be None on some ranks: a gradient that was not computed there.

    Raises:
        CannotRun: names, shapes or dtypes differ between ranks, or a leaf cannot be sent; all ranks raise.
    """
    own, same = wire.compared(lambda: _described(tree, sending), lambda found: _words(found, sending))
    if same:
        return own
    forms = wire.everyones({one.name: _without_device(one.form) for one in own})
    words = wire.everyones(_words(own, sending))
    if not _differ_in_absence_only(forms, [each[0] for each in words]):
        raise wire.disagreement(sending.action, words)
    device = next((one.form.device for one in own if one.form and one.form.device is not None), "cpu")
    return [_completed(one, forms, device) for one in own]


class Flats:
    """Leaves as flat arrays in host memory, [count], made when a bucket needs them and dropped with it."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._made: dict[int, Array | None] = {}

    def of(self, bucket: Bucket) -> dict[int, Array | None]:
        """The leaves of a bucket; None where this rank has no value."""
        needed = dict.fromkeys(run.leaf for run in bucket.runs)
        self._made = {leaf: self._made[leaf] if leaf in self._made else self._flat(leaf) for leaf in needed}
        return self._made

    def _flat(self, leaf: int) -> Array | None:
        value = self._values[leaf]
        return None if value is None else values_of(value).reshape(-1)


def _described(tree: Tree, sending: Sending) -> list[Sent]:
    sending.check()
    found = []
    for path, value in leaves(tree).items():
        form = None if value is None else form_of(value, name_of(path))
        if form is not None:
            sending.require(path, form)
        found.append(Sent(path=path, value=value, form=form))
    return found


def _words(found: Sequence[Sent], sending: Sending) -> list[str]:
    return [sending.also, *(f"{one.name} {'absent' if one.form is None else one.form}" for one in found)]


def _without_device(form: Form | None) -> Form | None:
    return None if form is None else replace(form, device=None)


def _differ_in_absence_only(forms: Sequence[Words], also: Sequence[str]) -> bool:
    if len(set(also)) > 1 or any(list(one) != list(forms[0]) for one in forms):
        return False
    return all(len({str(one[name]) for one in forms if one[name] is not None}) <= 1 for name in forms[0])


def _completed(one: Sent, forms: Sequence[Words], device: Any) -> Sent:
    """A leaf with the form that other ranks have, where this rank has no value."""
    absent = frozenset(rank for rank, words in enumerate(forms) if words[one.name] is None)
    if one.form is not None:
        return replace(one, absent=absent)
    there = next((words[one.name] for words in forms if words[one.name] is not None), None)
    if there is not None and there.kind == "tensor":
        there = replace(there, device=device)
    return replace(one, form=there, absent=absent)


def require_summable(path: Path, form: Form) -> None:
    """
    Raises:
        CannotRun: a leaf is of whole numbers or truth values.
    """
    if not form.is_summable:
        raise CannotRun(f"{name_of(path)!r} is of {form.word}; gradients are floating-point or complex")
