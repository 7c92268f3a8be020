from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.strategies.launchers import one_node_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """The variables that lead to a SLURM of one node."""
    if reason := one_node_slurm.missing():
        pytest.skip(reason)
    with one_node_slurm.one_node_slurm() as variables:
        yield variables
