"""The journal of a run, `run.jsonl`: one JSON object per line for every attempt, ending, decision and alert. No torch.

    {"event": "attempt", "attempt": k, "time": ..., "ranks": ..., "resumes": ..., "saved": ...,
     "since": ..., "base": ...}                    `saved`: the step of the newest checkpoint by then, 0 for none;
                                                   `since` and `base` as the options have them
    {"event": "plan", "attempt": k, "time": ..., "plan": ...}     the plan in use, as the JSON contract has it
    {"event": "ending", "attempt": k, "time": ..., "kind": a word of `endings`, "rank": ..., "host": ..., "step": ...,
     "reason": ..., "log": ..., "exit_status": ..., "first_step": ..., "last_step": ...}
                                                   for an attempt that did not complete
    {"event": "decision", "attempt": k, "time": ..., "action": a word of `policy`, "why": ..., "delay_seconds": ...}
    {"event": "saved", "attempt": k, "time": ..., "step": ..., "path": ..., ...}     a checkpoint is complete
    {"event": "back", "attempt": k, "time": ..., "step": ..., "seconds_lost": ...}   the run is where it was before
    {"event": "alert", "attempt": k, "time": ..., ...}        what a rank noticed
    {"event": "measured", "attempt": k, "time": ..., "measurement": ...}      the row that the attempt became in the
                                                   database, as `dsplan db export` writes it
    {"event": "end", "attempt": k, "time": ..., "outcome": ..., "exit_code": ..., "first_step": ..., "last_step": ...}

Times are seconds since 1970.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from hardware_db.notices import notice
from strategies.run_directory.files import JOURNAL_FILE


class Journal:
    """Appends to the journal of a run directory; a line is written whole, and a full disk stops nothing."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL_FILE
        self._has_reported = False

    def append(self, event: str, attempt: int, **fields: object) -> None:
        """Write one line; the first that cannot be written is reported on standard error."""
        row: dict[str, object] = {"event": event, "attempt": attempt, "time": round(time.time(), 3), **fields}
        line = (json.dumps(row) + "\n").encode()
        try:
            append_line(self._path, line)
        except OSError as problem:
            # The run matters more than its story, which the last page tells from memory too.
            if not self._has_reported:
                notice(f"{JOURNAL_FILE}: {problem.strerror}; the journal has gaps")
            self._has_reported = True


def append_line(path: Path, line: bytes) -> None:
    """Append a line in one call, which keeps it whole among those of others.

    What a full disk or a lost machine cut short keeps a line of its own.

    Raises:
        OSError: not all of it could be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def read_journal(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal; none where there is no journal."""
    path = directory / JOURNAL_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut short by the end of its process
        if isinstance(row, dict) and isinstance(row.get("attempt", 0), int):
            rows.append(row)
    return rows
