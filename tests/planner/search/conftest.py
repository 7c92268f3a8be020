"""The cost of a search, counted: the same on every machine."""

from __future__ import annotations

import pytest

from planner.search import evaluate
from planner.search.estimate import Priced
from planner.search.request import Request
from planner.types.plan import Configuration


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, Configuration]]:
    """Every configuration whose memory the search works out from here on, which is what takes its time."""
    seen: list[tuple[Request, Configuration]] = []
    real = evaluate.price

    def counted(request: Request, configuration: Configuration) -> Priced:
        seen.append((request, configuration))
        return real(request, configuration)

    monkeypatch.setattr(evaluate, "price", counted)
    return seen
