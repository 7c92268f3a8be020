"""Between `dsplan run` and a program that starts ranks: whatever becomes of the one, the other ends with it.

Run as `python -m strategies.launch.elastic.keeper PARENT_PID COMMAND...`. Programs such as DeepSpeed's leave their
ranks behind when they alone are ended; this ends the whole of their process group. SIGUSR1 is handed on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from types import FrameType

from strategies.launch.elastic.place import die_with_parent

# Less than the supervisor grants before it kills (process.end).
_GRACE_SECONDS = 7.0
_LOOK_SECONDS = 0.05


def main(parent: str, *command: str) -> int:
    """Run the command to its end or this process's; return its exit status, as a shell gives it."""
    ends_with_this = partial(die_with_parent, signal.SIGTERM, os.getpid())
    # The lock of the run directory, which this was started with, is the program's too.
    process = subprocess.Popen(command, start_new_session=True, close_fds=False, preexec_fn=ends_with_this)

    endings: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    def end(number: int, frame: FrameType | None) -> None:
        endings.append(number)

    signal.signal(signal.SIGUSR1, hand_on)
    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM, int(parent))
    # The handler must not ask for the status itself: where it interrupts poll or wait, whose lock is then held, the
    # answer is always that the program runs.
    while (status := process.poll()) is None:
        if endings:
            _end_group(process)
            return 128 + endings[0]
        time.sleep(_LOOK_SECONDS)
    _signal_group(process, signal.SIGKILL)  # what the program has left behind
    return 128 - status if status < 0 else status


def _end_group(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
