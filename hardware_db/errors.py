"""The one family of failures that people are expected to meet.

Anything raised from here is printed as a single line (what, where, what to do) and ends the command with `exit_code`.
Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class DsplanError(Exception):
    """An expected failure: bad input, a missing piece, a broken file."""

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        """Failures travel between ranks with their finished message; subclasses build theirs from other arguments."""
        return _restore, (type(self), self.args, self.__dict__)


class UnknownName(DsplanError):
    """A name that is not in a catalogue; the message offers the nearest ones.

    `called` is the whole of what was written where `name`, which is compared, is a part of it.
    """

    def __init__(self, what: str, name: str, candidates: Iterable[str], *, hint: str = "", called: str = "") -> None:
        lowered = {candidate.lower(): candidate for candidate in candidates}
        # A name that is one word of others is meant sooner than letters that happen to be alike: M2 is no MI250.
        word = re.compile(rf"(?<![a-z0-9]){re.escape(name.lower())}(?![a-z0-9])") if name.strip() else None
        holding = sorted((candidate for candidate in lowered if word and word.search(candidate)), key=len)[:3]
        alike = holding or difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)
        near = [lowered[match] for match in alike]
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        super().__init__(f"unknown {what} {(called or name)!r}{nearest}{'; ' + hint if hint else ''}")
        self.near = near


class BrokenFile(DsplanError):
    """A file dsplan was told to read and cannot use; one line, whatever is in its name."""

    def __init__(self, path: object, problem: str, remedy: str = "") -> None:
        line = f"{path}: {problem}{'; ' + remedy if remedy else ''}"
        super().__init__(
            "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
        )


def _restore(kind: type[DsplanError], arguments: tuple[object, ...], attributes: dict[str, object]) -> DsplanError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(attributes)
    return error
