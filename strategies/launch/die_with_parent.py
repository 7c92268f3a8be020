"""Ask the kernel to end this process when the one that started it ends, so that no rank outlives its run."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signal_number: signal.Signals, parent: int) -> None:
    """Receive `signal_number` when process `parent` dies (Linux; elsewhere nothing is asked).

    A parent that died before the request was made is noticed by its changed process id.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)
