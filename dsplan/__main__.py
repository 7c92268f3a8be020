"""Entry point of the `dsplan` command: expected failures become one line and an exit status.

Nothing is imported above `main` that takes time: an interrupt while it is would end in a traceback.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TextIO

COLLECT_AFTER = 100_000
"""New objects between two garbage collections. Python's 700 make 80 of them while modules are imported and a plan is
searched, which take a tenth of the process's time, and there is next to nothing to collect."""

_LONGEST_WORD = 300
INTERRUPTED = 130
READER_GONE = 141
"""What a shell says of a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status. Bugs keep their traceback.

    Without `arguments` it is the process's own command line, and the process's streams and signals are its own too.

    Status 0: it fits, or the command did its work; 1: it does not fit; 2: bad input; 130: interrupted; 141: what read
    the answer is gone.
    """
    try:
        own = arguments is None
        if own:
            _end_at_once_when_interrupted()
            closed = _open_closed_streams()
            if 1 in closed:
                return _fail("the standard output is closed; redirect it to a file or to /dev/null", 2)
            sys.stdout = _own_output()
        _prepare()
        if own:
            _raise_when_interrupted()
        status = _answer(sys.argv[1:] if arguments is None else arguments)
        if own:
            _end_at_once_when_interrupted()
            _spare_the_last_collection()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED


def _prepare() -> None:
    """Return what every command needs: its modules, and streams that print any text."""
    import gc
    from contextlib import suppress

    gc.set_threshold(COLLECT_AFTER)
    import dsplan.cli.app  # noqa: F401

    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _spare_the_last_collection() -> None:
    """Keep Python from looking through all objects for cycles once more while it exits, a tenth of a plan's time.

    What is open is closed where it was used, functions of `atexit` run, and the system takes the memory back.
    """
    import gc

    gc.freeze()


def _answer(arguments: Sequence[str]) -> int:
    from dsplan.cli.app import run
    from hardware_db.errors import DsplanError

    try:
        status = run(arguments)
        sys.stdout.flush()
        return status
    except DsplanError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        _throw_output_away()
        return READER_GONE
    except _OutputFails as error:
        _throw_output_away()
        return _fail(f"the standard output cannot be written ({error}); free space there or redirect it", 2)


def _end_at_once_when_interrupted() -> None:
    """Let an interrupt end the process without a traceback.

    Before and after a command there is nothing to put in order, and modules being imported cannot be interrupted
    cleanly: Python prints what a callback of its import machinery raises.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _raise_when_interrupted() -> None:
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_closed_streams() -> list[int]:
    """Give standard streams that were closed a file that leads nowhere.

    Else the next file opened, perhaps a database, would get their number and what is printed to it.
    """
    closed = []
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.append(os.open(os.devnull, os.O_RDWR))
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    return closed


class _OutputFails(Exception):
    """The standard output takes nothing, for a reason in the system's words."""


class _Output(io.FileIO):
    """The standard output, whose failures can be told from those of files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _OutputFails(error.strerror or "it fails") from None


def _own_output() -> TextIO:
    plain = sys.stdout
    buffer = io.BufferedWriter(_Output(plain.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, plain.encoding, line_buffering=plain.isatty())


def _throw_output_away() -> None:
    """Python flushes the standard output once more when it exits, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, exit_code: int) -> int:
    import contextlib

    from hardware_db.notices import notice

    words = (word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}…" for word in message.split())
    with contextlib.suppress(OSError):  # nobody can be told where even that is full
        notice(" ".join(words))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
