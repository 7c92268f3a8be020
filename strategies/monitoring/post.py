"""Leave an alert where `dsplan run` finds it. No torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from strategies.metrics import metrics_path
from strategies.monitoring.alerts import Alert
from strategies.variables import RUN_DIRECTORY


def post(alert: Alert) -> None:
    """Append an alert of this rank to its metrics; on stderr where no run watches, or where the file takes no more.

    Raises nothing: an alert ends no training.
    """
    rank = int(os.environ.get("RANK", "0"))
    told = replace(alert, rank=rank)
    directory = os.environ.get(RUN_DIRECTORY)
    try:
        if not directory:
            raise FileNotFoundError(RUN_DIRECTORY)
        append_line(metrics_path(Path(directory), rank), json.dumps(told.to_row()))
    except OSError:
        print(f"dsplan: {told.line()}", file=sys.stderr, flush=True)


def append_line(path: Path, line: str) -> None:
    """One line in one write, which no other writer of the file can come between.

    Raises:
        OSError: the file cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)
