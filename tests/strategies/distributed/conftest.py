"""One process that has imported torch, from which the tests of this folder start theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.strategies.distributed.starts import Starter


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    started = Starter(tmp_path_factory.mktemp("starts"))
    yield started
    started.close()
