"""Measurements of ranks on their cards: rates before they plan, and the driver's figures while they train."""

from __future__ import annotations

import pytest

from tests.emulated_cuda.fixtures import CardPool
from tests.strategies.cuda import measured_bodies


@pytest.mark.parametrize(("left_mib", "sizes"), [(150, [2]), (1000, [64, 2])])
@pytest.mark.sweep(every=2)
def test_a_point_without_room_on_any_card_is_left_out(two_cards: CardPool, left_mib: int, sizes: list[int]) -> None:
    """It ended the run, which would have found room for its training."""
    assert two_cards.run(measured_bodies.measured_beside, left_mib) == [{"sizes": sizes, "kept": 0}] * 2


def test_a_rank_samples_the_card_that_it_trains_on(two_cards: CardPool) -> None:
    for reserved, figures in two_cards.run(measured_bodies.gpu_figures, 100):
        assert figures["gpu_memory_used_bytes"] >= reserved >= 100 * measured_bodies.MIB
        assert 0 <= figures["gpu_utilization_percent"] <= 100
        assert {"gpu_temperature_celsius", "gpu_power_watts", "gpu_clock_mhz", "gpu_throttled"} <= set(figures)
