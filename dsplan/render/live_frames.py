"""A run's frames drawn over each other on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live

from dsplan.render.show import renderables
from dsplan.render.watch_view import Frame, frame_blocks


def follow(look: Callable[[], Frame], seconds: float) -> None:
    """Look again every so many seconds until the run ends; its last frame stays."""
    console = Console(highlight=False, markup=False, emoji=False)

    def drawn(frame: Frame) -> Group:
        unicode = console.encoding.startswith("utf")
        return Group(*renderables(frame_blocks(frame, console.width, unicode=unicode), console))

    frame = look()
    with Live(drawn(frame), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while frame.run.is_running:
            time.sleep(seconds)
            frame = look()
            live.update(drawn(frame), refresh=True)
