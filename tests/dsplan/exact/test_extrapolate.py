"""Readings at sizes that were never traced, from others; and when that is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsplan.exact.ask import Phases, extrapolated
from dsplan.exact.reading import Reading, Sizes
from planner.cost.memory.ledger import Ledger

Bytes = Callable[[Sizes], float]


def phases(activations: Bytes, sizes: Sizes) -> Phases:
    return {
        "forward": Ledger(parameters=1e9, activations=activations(sizes)),
        "step": Ledger(parameters=1e9, temporaries=5e8),
    }


def readings(activations: Bytes, *sizes: Sizes) -> list[Reading]:
    return [Reading(sizes=size, phases=phases(activations, size)) for size in sizes]


def at(samples: int, length: int = 512) -> Sizes:
    return Sizes(micro_batch=samples, sequence=length)


def fused(sizes: Sizes) -> float:
    return 7e5 + 3e6 * sizes.micro_batch * sizes.sequence


def eager(sizes: Sizes) -> float:
    return fused(sizes) + 40.0 * sizes.micro_batch * sizes.sequence**2


@pytest.mark.parametrize("samples", [3, 8, 64])
@pytest.mark.parametrize("activations", [fused, eager])
def test_samples_are_affine(activations: Bytes, samples: int) -> None:
    traces = readings(activations, at(2), at(4))
    answer = extrapolated(traces, at(samples), lambda sizes: phases(activations, sizes))
    assert answer is not None
    assert answer.taken_from == (at(2), at(4))
    assert answer.phases["forward"].activations == pytest.approx(activations(at(samples)), rel=1e-12)
    assert answer.phases["step"] == phases(activations, at(2))["step"]


@pytest.mark.parametrize("activations", [fused, eager])
def test_positions_are_quadratic_at_most(activations: Bytes) -> None:
    traces = readings(activations, at(1, 512), at(1, 1024), at(1, 2048))
    answer = extrapolated(traces, at(1, 8192), lambda sizes: phases(activations, sizes))
    assert answer is not None
    assert answer.taken_from == tuple(reading.sizes for reading in traces)
    assert answer.phases["forward"].activations == pytest.approx(activations(at(1, 8192)), rel=1e-9)


@pytest.mark.parametrize(
    ("traced", "wanted"),
    [
        ((), at(8)),
        ((at(2),), at(8)),
        ((at(1), at(2)), at(8)),  # one sample is special
        ((at(2), at(4)), at(1)),
        ((at(2, 256), at(4, 512)), at(8)),
        ((at(2, 256), at(2, 1024)), at(2)),
        ((at(2, 256), at(2, 1024), at(4, 2048)), at(2)),
    ],
)
def test_too_few_traces_say_nothing(traced: tuple[Sizes, ...], wanted: Sizes) -> None:
    assert extrapolated(readings(eager, *traced), wanted, lambda sizes: phases(eager, sizes)) is None


def test_the_nearest_traces_are_taken_and_the_others_must_lie_on_their_line() -> None:
    traces = readings(fused, at(2), at(4), at(16))
    answer = extrapolated(traces, at(15), lambda sizes: phases(fused, sizes))
    assert answer is not None
    assert answer.taken_from == (at(4), at(16))
    bent = [*traces[1:], *readings(lambda sizes: 2 * fused(sizes), at(2))]
    assert extrapolated(bent, at(15), lambda sizes: phases(fused, sizes)) is None


def test_a_peak_that_moves_to_another_moment_is_traced_again() -> None:
    """Two samples peak where all gradients are alive, thirty where all activations are: no line goes through both."""

    def peak(sizes: Sizes) -> float:
        return max(2e10, fused(sizes))

    assert fused(at(4)) < 2e10 < fused(at(30))
    traces = readings(peak, at(2), at(4))
    assert extrapolated(traces, at(5), lambda sizes: phases(peak, sizes)) is not None
    assert extrapolated(traces, at(30), lambda sizes: phases(peak, sizes)) is None


def test_a_window_that_begins_to_bind_is_traced_again() -> None:
    def windowed(sizes: Sizes) -> float:
        return 4e3 * sizes.micro_batch * sizes.sequence * min(sizes.sequence, 4096)

    traces = readings(windowed, at(1, 1024), at(1, 2048), at(1, 4096))
    assert extrapolated(traces, at(1, 3072), lambda sizes: phases(windowed, sizes)) is not None
    assert extrapolated(traces, at(1, 8192), lambda sizes: phases(windowed, sizes)) is None
