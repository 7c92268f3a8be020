"""Failures of running a plan that people are expected to meet."""

from __future__ import annotations

from hardware_db.errors import BrokenFile, DsplanError, UnknownName

__all__ = ["BackendMissing", "BrokenFile", "CannotMeet", "CannotRun", "DsplanError", "UnknownName"]


class BackendMissing(DsplanError):
    """A plan needs a library that is not installed; the message names the command that installs it."""


class CannotRun(DsplanError):
    """A plan, a config or an argument that this engine cannot run; the message says which and what to do."""


class CannotMeet(CannotRun):
    """Ranks that do not find each other or do not fit together; the message says what to change in their start."""
