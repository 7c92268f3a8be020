"""Failures of planning that people are expected to meet."""

from __future__ import annotations

from hardware_db.errors import BrokenFile, DsplanError, UnknownName

__all__ = ["BrokenFile", "ContradictoryRequest", "DsplanError", "NothingFits", "UnknownName"]


class ContradictoryRequest(DsplanError):
    """Flags or fields that cannot hold at the same time."""


class NothingFits(DsplanError):
    """No plan fits where the caller needs one; the message names the closest miss and remedies."""

    exit_code = 1
