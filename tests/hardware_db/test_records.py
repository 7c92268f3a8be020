"""Classes whose methods are written at their first use behave as those of `dataclasses`."""

import copy
import dataclasses
import pickle
from typing import ClassVar

import pytest

from hardware_db.records import dataclass

OPTIONS = {"frozen": True, "slots": True}


@dataclass(kw_only=True, **OPTIONS)
class Narrow:
    a: int


@dataclass(kw_only=True, **OPTIONS)
class Wide(Narrow):
    b: str
    more: tuple = ()


def _shapes(decorator):
    """The same three classes, made by either decorator."""

    @decorator(kw_only=True, **OPTIONS)
    class Base:
        unit: ClassVar[str] = "s"
        a: int
        b: list = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self):
            if self.a < 0:
                raise ValueError(f"a is {self.a}")

        @property
        def double(self):
            return 2 * self.a

    @decorator(kw_only=True, **OPTIONS)
    class Derived(Base):
        a: int = 3
        c: str = dataclasses.field(default="c", repr=False)
        d: float = dataclasses.field(default=0.5, init=False)

    @decorator(**OPTIONS)
    class Positional:
        x: int
        y: int = 2

    return Base, Derived, Positional


THEIRS, OURS = _shapes(dataclasses.dataclass), _shapes(dataclass)

USES = {
    "repr": lambda base, derived, positional: [repr(it) for it in (base(a=1), derived(c="q"), positional(1))],
    "equality": lambda base, derived, positional: [
        base(a=1, b=[1]) == base(a=1),
        base(a=1) == base(a=2),
        base(a=3) == derived(),
        positional(1) != positional(1, 2),
        positional(1) == (1, 2),
    ],
    "hash": lambda base, derived, positional: [hash(base(a=1, b=[4])), hash(derived(a=2)), hash(positional(1))],
    "fields": lambda *classes: [[(it.name, it.type, it.kw_only) for it in dataclasses.fields(cls)] for cls in classes],
    "dict": lambda base, derived, positional: [dataclasses.asdict(it) for it in (base(a=1), derived(), positional(1))],
    "replace": lambda base, derived, _: [repr(dataclasses.replace(it, a=7)) for it in (base(a=1), derived(c="z"))],
    "copy": lambda _, derived, __: repr(copy.deepcopy(derived(b=[1]))),
    "slots": lambda *classes: [cls.__slots__ for cls in classes],
    "match": lambda *classes: [cls.__match_args__ for cls in classes],
    "own members": lambda base, derived, _: (base.unit, derived(a=4).double, derived().d),
    "factory": lambda base, *_: base(a=1).b is not base(a=1).b,
}


@pytest.mark.parametrize("use", USES)
def test_a_use_shows_what_it_shows_of_a_dataclass(use):
    assert USES[use](*OURS) == USES[use](*THEIRS)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda base, *_: base(),
        lambda base, *_: base(a=1, z=2),
        lambda base, *_: base(1),
        lambda base, *_: base(a=-1),
        lambda base, *_: setattr(base(a=1), "a", 2),
        lambda base, *_: delattr(base(a=1), "a"),
        lambda _, derived, __: derived(d=1.0),
        lambda _, __, positional: positional(1, 2, 3),
    ],
)
def test_what_a_dataclass_refuses_is_refused_in_the_same_words(wrong):
    with pytest.raises((TypeError, ValueError, AttributeError)) as theirs:
        wrong(*THEIRS)
    with pytest.raises(theirs.type) as ours:
        wrong(*OURS)
    assert str(ours.value) == str(theirs.value)


def test_nothing_is_compiled_before_a_class_is_used():
    @dataclass(kw_only=True, **OPTIONS)
    class Unused:
        a: int

    assert "__dataclass_fields__" in vars(Unused)
    assert Unused.__init__.__code__.co_varnames[:3] == ("self", "args", "named")
    assert Unused(a=1).a == 1
    assert Unused.__init__.__code__.co_varnames == ("self", "a")


def test_a_record_is_pickled_and_a_subclass_of_one_too():
    first = Wide(a=1, b="x", more=(1,))
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_class_that_is_not_frozen_is_a_plain_dataclass():
    @dataclass(slots=True)
    class Loose:
        a: int = 1

    loose = Loose()
    loose.a = 2
    assert loose == Loose(2)
