"""A script that ends with an expected failure says it in one line, and ranks that cannot meet say it once per node.

Python would print the whole traceback of every rank, in which the line that says what to do is the last of hundreds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from types import TracebackType

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from strategies.errors import CannotMeet

# Ranks of one node fail within this of each other: they read one verdict, or wait equally long.
_TOGETHER_SECONDS = 2.0
_JOB_VARIABLES = (
    ("TORCHELASTIC_RUN_ID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
    ("MASTER_ADDR", "MASTER_PORT"),
)

_before = sys.excepthook


def install_excepthook() -> None:
    """End this process with one line and its exit status for a DsplanError; the rest keep their traceback."""
    global _before
    if sys.excepthook is not _report:
        _before, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not isinstance(error, DsplanError):
        _before(kind, error, traceback)
        return
    if isinstance(error, CannotMeet):
        report_once(error)
    else:
        _print_line(error)
    raise SystemExit(error.exit_code)


def _print_line(error: DsplanError) -> None:
    notice(" ".join(str(error).split()))


def report_once(error: CannotMeet) -> None:
    """Print the line of a failure unless another process of this job printed its own on this node a moment ago.

    The first binds a name that the kernel frees when it ends (Linux's abstract sockets), so nothing is left behind.
    """
    if not sys.platform.startswith("linux"):
        _print_line(error)
        return
    job = hashlib.sha256(_job().encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound, contextlib.suppress(OSError):
        bound.bind(f"\0dsplan-reported-{os.getuid()}-{job}")
        _print_line(error)
        time.sleep(_TOGETHER_SECONDS)


def _job() -> str:
    """Return what the ranks of one job on this node have in common and those of another have not."""
    for names in _JOB_VARIABLES:
        if values := [os.environ[name] for name in names if name in os.environ]:
            return ",".join(values)
    return str(os.getppid())
