"""A run's frames drawn over each other on a terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from rich.console import Console, Group
from rich.live import Live

from dsplan.render.show import print_blocks, renderables, takes_blocks, terminal
from dsplan.render.watch_view import DETAILS, Detail, Frame, frame_blocks

_GLANCE_SECONDS = 0.1
"""Between two looks at the size of the terminal."""
_SOME_RANKS = 4
"""So many are worth more than curves or earlier alerts."""
_SHARE = 0.2
"""Of the time, at most, for looking at a run: it is its machine that looks."""


def follow(look: Callable[[], Frame], seconds: float) -> None:
    """Look again every so many seconds until the run ends, on a screen of its own.

    The last frame stays behind, whole, also where the page is interrupted or ended.
    """
    console = terminal()
    frame = look()
    ended = signal.signal(signal.SIGTERM, _end)
    stopped = signal.getsignal(signal.SIGTSTP)
    try:
        if frame.run.is_running:
            with Live(console=console, auto_refresh=False, screen=True) as live:
                signal.signal(signal.SIGTSTP, lambda *_: _pause(live))
                while frame.run.is_running:
                    began = time.monotonic()
                    live.update(page(frame, console), refresh=True)
                    _wait(live, frame, began + seconds)
                    began = time.monotonic()
                    frame = look()
                    seconds = max(seconds, (time.monotonic() - began) / _SHARE)
    finally:
        signal.signal(signal.SIGTERM, ended)
        signal.signal(signal.SIGTSTP, stopped)
        print_blocks(frame_blocks(frame, console.width, unicode=takes_blocks(console)))


def _end(number: int, _: FrameType | None) -> None:
    """Leave the screen before the process ends."""
    sys.exit(128 + number)


def _pause(live: Live) -> None:
    """Give the screen back while the shell has stopped this process with Ctrl-Z."""
    live.stop()
    stop_process()
    live.start(refresh=True)


def stop_process() -> None:
    """Wait until the shell resumes this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _wait(live: Live, frame: Frame, until: float) -> None:
    """Draw again at once where the terminal changes its size."""
    size = live.console.size
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _GLANCE_SECONDS))
        if size != (size := live.console.size):
            live.update(page(frame, live.console), refresh=True)


def page(frame: Frame, console: Console) -> Group:
    """As much of a frame as there is room for."""

    def drawn(detail: Detail) -> Group:
        blocks = frame_blocks(frame, console.width, unicode=takes_blocks(console), detail=detail)
        return Group(*renderables(blocks, console, names_left_out=False))

    def spare(detail: Detail) -> int:
        """Lines that are left."""
        return console.height - len(console.render_lines(drawn(detail), pad=False))

    for detail in DETAILS:
        if spare(detail) >= 0:
            return drawn(detail)
        # Every rank has one line; headings and the line about the others come with the first.
        some = replace(detail, ranks=_SOME_RANKS)
        if len(frame.ranks) > _SOME_RANKS and (left := spare(some)) >= 0:
            return drawn(replace(detail, ranks=_SOME_RANKS + left))
    lowest = DETAILS[-1]
    return drawn(replace(lowest, ranks=max(0, 1 + spare(replace(lowest, ranks=1)))))
