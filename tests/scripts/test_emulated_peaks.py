"""What the planner says of the peaks that were measured on emulated cards."""

from __future__ import annotations

import pytest

from hardware_db.measured_rows import EmulatedRun, read_rows
from scripts.measure.emulated_peaks import ROWS
from scripts.measure.memory_rows import compared_to_emulated


@pytest.mark.parametrize(
    ("backend", "requested", "allocated"), [("torch", 0.03, 0.055), ("native", 0.05, 0.05)], ids=["torch", "native"]
)
def test_predicted_peaks_are_near_those_of_emulated_cards(backend: str, requested: float, allocated: float) -> None:
    runs = [run for run in read_rows(EmulatedRun, ROWS) if run.backend == backend]
    assert len(runs) > 10
    for compared in map(compared_to_emulated, runs):
        assert abs(compared.requested_error) < requested, compared.run
        assert abs(compared.error()) < allocated, compared.run
