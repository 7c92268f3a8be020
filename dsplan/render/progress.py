"""What is being done, on a terminal; nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows a line with a spinner on stderr until the block ends. Rich is imported with its first line:
    answers that are at hand neither need it nor wait for it."""
    with contextlib.ExitStack() as shown:
        lines: list[Callable[[str], None]] = []

        def report(text: str) -> None:
            if not sys.stderr.isatty():
                return
            if not lines:
                lines.append(_spinner(shown, text))
            lines[0](text)

        yield report


def _spinner(shown: contextlib.ExitStack, text: str) -> Callable[[str], None]:
    from rich.console import Console

    status = shown.enter_context(Console(stderr=True, highlight=False, markup=False).status(text))
    return status.update
