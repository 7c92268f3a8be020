"""Pools of ranks, started once per session and shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hardware_db.spawn import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks over gloo."""
    with RankPool(2) as pool:
        yield pool
