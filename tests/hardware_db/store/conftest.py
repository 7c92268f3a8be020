"""A store of each kind, for the tests of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hardware_db.store import MemoryStore, Store, open_store

STORES: dict[str, Callable[[Path], Store]] = {
    "sqlite": lambda directory: open_store(directory / "dsplan.db"),
    "memory": lambda directory: MemoryStore(),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store, once of each kind."""
    with STORES[request.param](tmp_path) as opened:
        yield opened
