"""Runs the command line inside the test's process and keeps what it printed."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

import pytest

from dsplan.__main__ import main


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """`cli("recommend --model opt-125m")`: one command line; words with spaces are quoted or extra arguments."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured = captured

    def __call__(self, line: str, *more: object) -> Printed:
        self._captured.readouterr()
        status = main([*shlex.split(line), *map(str, more)])
        out, err = self._captured.readouterr()
        return Printed(status=status, out=out, err=err)

    def refuses(self, line: str, *more: object) -> str:
        """The one line on stderr of a command that must end with status 2 and print nothing else."""
        printed = self(line, *more)
        assert printed.status == 2, printed
        assert printed.out == ""
        assert printed.err.startswith("dsplan: ")
        assert printed.err.count("\n") == 1
        assert printed.err.endswith("\n")
        return printed.err
