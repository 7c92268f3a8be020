"""The one family of failures that people are expected to meet.

Anything raised from here is printed as a single line (what, where, what to do) and ends the command with `exit_code`.
Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DsplanError(Exception):
    """An expected failure: bad input, a missing piece, a broken file."""

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        """Failures travel between ranks with their finished message; subclasses build theirs from other arguments."""
        return _restored, (type(self), self.args, self.__dict__)


class UnknownName(DsplanError):
    """A name that is not in a catalogue; the message offers the nearest ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        lowered = {candidate.lower(): candidate for candidate in known}
        near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        super().__init__(f"unknown {what} {name!r}{nearest}{'; ' + hint if hint else ''}")
        self.near = near


class BrokenFile(DsplanError):
    """A file dsplan was told to read and cannot use; one line, whatever is in its name."""

    def __init__(self, path: object, problem: str, remedy: str = "") -> None:
        line = f"{path}: {problem}{'; ' + remedy if remedy else ''}"
        super().__init__(
            "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
        )


def _restored(kind: type[DsplanError], arguments: tuple[object, ...], attributes: dict[str, object]) -> DsplanError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(attributes)
    return error
