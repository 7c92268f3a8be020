"""A store of each kind, for the tests of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hardware_db.store import MemoryStore, Store, open_store
from tests.hardware_db.store.server import Server, running_server

STORES: dict[str, Callable[[Path], Store]] = {
    "sqlite": lambda directory: open_store(directory / "dsplan.db"),
    "memory": lambda directory: MemoryStore(),
}


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A real PostgreSQL server."""
    with running_server() as started:
        yield started


@pytest.fixture(params=[*STORES, "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store, once of each kind."""
    if request.param == "postgres":
        from hardware_db.store.postgres import PostgresStore

        opened: Store = PostgresStore(request.getfixturevalue("server").empty())
    else:
        opened = STORES[request.param](tmp_path)
    with opened:
        yield opened
