"""Starts processes from one that has imported torch already: each is forked from it.

Run as `python starter.py`; a line of JSON per process on stdin, `{"program", "arguments", "variables", "output"}`, and
a line per process that ended on stdout, `{"output", "status", "seconds"}`. `program` is a file or `-m`'s module.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import sys
import time
from typing import Any

import strategies.engine.initialize
import strategies.launch.hooks.script_plan  # noqa: F401


def main() -> dict[str, Any] | None:
    """Serve until stdin ends; in a child, the job that it is to do."""
    running: dict[int, tuple[str, float]] = {}
    pending = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return None
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                job = json.loads(line)
                child = os.fork()
                if child == 0:
                    return dict(job)
                running[child] = (job["output"], time.monotonic())
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            output, begun = running.pop(ended[0])
            status = os.waitstatus_to_exitcode(ended[1])
            print(json.dumps({"output": output, "status": status, "seconds": time.monotonic() - begun}), flush=True)


def become(job: dict[str, Any]) -> None:
    """Turn this process into the one that the job describes."""
    null = os.open(os.devnull, os.O_RDONLY)
    opened = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, source in ((0, null), (1, opened), (2, opened)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(job["variables"])
    sys.argv = [job["program"], *job["arguments"]]


def run(program: str) -> int:
    """Run a program as the interpreter would; its exit status."""
    try:
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


job = main()
if job is not None:
    become(job)
    status = run(job["program"])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing torch down takes seconds of each of many processes.
    os._exit(status)
