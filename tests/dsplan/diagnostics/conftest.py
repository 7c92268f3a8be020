"""Diagnostics run on a machine that was measured, as training does."""

from __future__ import annotations

from tests.strategies.conftest import database_with_rates, dsplan_home, ranks

__all__ = ["database_with_rates", "dsplan_home", "ranks"]
