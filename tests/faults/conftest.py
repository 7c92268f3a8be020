"""The runs that the faults are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ledger import Step
from suite import Reference, uninterrupted


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The steps of a run with some settings to which nothing happens; trained once per module."""
    known: dict[str, list[Step]] = {}

    def steps(settings: Mapping[str, Any]) -> list[Step]:
        key = repr(sorted(settings.items()))
        if key not in known:
            known[key] = uninterrupted(tmp_path_factory.mktemp("uninterrupted"), settings)
        return known[key]

    return steps
