"""Starts processes from one that has imported torch already: each is forked, and ends as an interpreter of its own.

Run as `python starter.py`; a line of JSON per process on stdin, `{"program", "arguments", "variables", "output"}`, and
a line per process that ended on stdout, `{"output", "status", "seconds"}`. `program` is a file or `-m`'s module.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import sys
import time
from typing import Any

import strategies.engine
import strategies.launch.hooks.live  # noqa: F401


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


job = main()
if job is not None:
    null = os.open(os.devnull, os.O_RDONLY)
    opened = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, source in ((0, null), (1, opened), (2, opened)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(job["variables"])
    sys.argv = [job["program"], *job["arguments"]]
    # Nothing is caught: what ends the program ends this process the way Python does.
    if job["program"].endswith(".py"):
        runpy.run_path(job["program"], run_name="__main__")
    else:
        runpy.run_module(job["program"], run_name="__main__", alter_sys=True)
