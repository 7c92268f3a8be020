"""A terminal that closes asks the command in it for a stop."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

WAITS = """
import os, sys, time
terminal = os.open(sys.argv[1], os.O_RDWR)  # becomes the terminal of this session
if "nohup" not in sys.argv:
    [os.dup2(terminal, descriptor) for descriptor in (0, 1, 2)]
from strategies.launch.grace_period import StopRequests
with StopRequests() as requests:
    os.write(terminal, b"ready\\n")
    until = time.monotonic() + (1.0 if "nohup" in sys.argv else 30.0)
    while not requests.came and time.monotonic() < until:
        time.sleep(0.01)
    print("to a terminal that may be gone", flush=True)
    print("as errors go", file=sys.stderr, flush=True)
open(sys.argv[2], "w").write("asked to stop" if requests.preempted_at else "continues")
"""


@pytest.mark.parametrize(("before", "told"), [((), "asked to stop"), (("nohup",), "continues")])
def test_a_closed_terminal_asks_for_a_stop_and_nohup_continues(
    before: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    script, received, output = tmp_path / "waits.py", tmp_path / "told", tmp_path / "output"
    script.write_text(WAITS)
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*before, sys.executable, script, os.ttyname(theirs), received, *before],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )  # fmt: skip
    assert os.read(ours, 100).startswith(b"ready"), output.read_text()
    os.close(theirs)
    os.close(ours)
    assert process.wait(timeout=60) == 0, output.read_text()
    assert received.read_text() == told
