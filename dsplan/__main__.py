"""Entry point of the `dsplan` command: expected failures become one line and an exit status."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

from hardware_db.errors import DsplanError

COLLECT_AFTER = 100_000
"""New objects between two garbage collections. Python's 700 make 80 of them while modules are imported and a plan is
searched, which take a tenth of the process's time, and there is next to nothing to collect."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status. Bugs keep their traceback.

    Status 0: it fits, or the command did its work; 1: it does not fit; 2: bad input; 130: interrupted.
    """
    gc.set_threshold(COLLECT_AFTER)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return _run(arguments)
    except DsplanError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`head`, a closed pager) is gone; Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    import typer

    from dsplan.cli.app import build
    from dsplan.cli.complaints import complaint

    # UsageError, the base of every complaint about flags, which typer exports under no name of its own.
    usage_error: Any = typer.BadParameter.__base__
    try:
        status = build().main(args=arguments, prog_name="dsplan", standalone_mode=False)
        sys.stdout.flush()
    except usage_error as error:
        return _fail(complaint(error), error.exit_code)
    except typer.Abort:
        return 130
    return status if isinstance(status, int) else 0


def _fail(message: str, exit_code: int) -> int:
    print(f"dsplan: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
