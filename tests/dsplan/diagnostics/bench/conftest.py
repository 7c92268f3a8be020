"""Benchmarks begin with a machine that was not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_db.files import DATABASE_NAME


@pytest.fixture(autouse=True)
def _machine_was_not_measured(dsplan_home: Path) -> None:
    """Leave the test without a database."""
    (dsplan_home / DATABASE_NAME).unlink()
