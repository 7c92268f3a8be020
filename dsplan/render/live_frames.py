"""Frames of a run, or of many runs, drawn over each other on a terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Generic, TypeVar

from rich.console import Console, Group
from rich.live import Live

from dsplan.render.runs_view import runs_blocks
from dsplan.render.show import Block, print_blocks, renderables, takes_blocks, terminal
from dsplan.render.watch_view import DETAILS, Detail, Frame, frame_blocks
from strategies.launch.run_status import RunStatus

Seen = TypeVar("Seen")

_GLANCE_SECONDS = 0.1
"""Between two looks at the size of the terminal."""
_SOME_RANKS = 4
"""So many are worth more than curves or earlier alerts."""
_SHARE = 0.2
"""Of the time, at most, for looking at a run: it is its machine that looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View(Generic[Seen]):
    """Something that is looked at again and again, and how it is drawn."""

    look: Callable[[], Seen]
    page: Callable[[Seen, Console], Group]
    """As much of it as there is room for."""
    whole: Callable[[Seen, Console], Sequence[Block]]
    """All of it, which stays behind at the end."""
    continues: Callable[[Seen], bool]


def follow(look: Callable[[], Frame], seconds: float) -> None:
    """Draw a run every so many seconds until it ends."""

    def whole(frame: Frame, console: Console) -> Sequence[Block]:
        return frame_blocks(frame, console.width, unicode=takes_blocks(console))

    draw(View(look=look, page=page, whole=whole, continues=lambda frame: frame.run.is_running), seconds)


def follow_runs(look: Callable[[], Sequence[RunStatus]], seconds: float, price: float | None) -> None:
    """Draw many runs every so many seconds until the page is interrupted."""
    draw(
        View(
            look=look,
            page=lambda runs, console: runs_page(runs, console, price),
            whole=lambda runs, console: runs_blocks(runs, price),
            continues=lambda runs: True,
        ),
        seconds,
    )


def draw(view: View[Seen], seconds: float) -> None:
    """Look again every so many seconds while there is something to see, on a screen of its own.

    What was seen last stays behind, whole, also where the page is interrupted or ended.
    """
    console = terminal()
    seen = view.look()
    ended = signal.signal(signal.SIGTERM, _end)
    stopped = signal.getsignal(signal.SIGTSTP)
    try:
        if view.continues(seen):
            with Live(console=console, auto_refresh=False, screen=True) as live:
                signal.signal(signal.SIGTSTP, lambda *_: _pause(live))
                while view.continues(seen):
                    began = time.monotonic()
                    live.update(view.page(seen, console), refresh=True)
                    _wait(live, partial(view.page, seen), began + seconds)
                    began = time.monotonic()
                    seen = view.look()
                    seconds = max(seconds, (time.monotonic() - began) / _SHARE)
    finally:
        signal.signal(signal.SIGTERM, ended)
        signal.signal(signal.SIGTSTP, stopped)
        print_blocks(view.whole(seen, console))


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


def _wait(live: Live, drawn: Callable[[Console], Group], until: float) -> None:
    """Draw again at once where the terminal changes its size."""
    size = live.console.size
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _GLANCE_SECONDS))
        if size != (size := live.console.size):
            live.update(drawn(live.console), refresh=True)


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


def runs_page(runs: Sequence[RunStatus], console: Console, price: float | None) -> Group:
    """As many of the runs as there is room for, those first that go on."""
    most = min(len(runs), console.height)
    while True:
        drawn = Group(*renderables(runs_blocks(runs, price, most=most), console, names_left_out=False))
        over = len(console.render_lines(drawn, pad=False)) - console.height
        if over <= 0 or not most:
            return drawn
        most = max(0, most - max(1, over // 3))  # a run's line may be folded, and have a reason below the table
