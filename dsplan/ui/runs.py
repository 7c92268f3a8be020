"""The page of a team's runs beside the page of questions: the table of `dsplan watch --runs`, drawn anew by itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from dsplan.render.html import blocks_html
from dsplan.render.runs_view import runs_blocks
from dsplan.report.page import style
from hardware_db.errors import BrokenFile, DsplanError
from strategies.launch.reported_runs import runs_at

REFRESH_SECONDS = 5
"""Between two pages of one reader, and at least between two looks at the files, however many read."""

# A page that loads itself anew by a `meta` element loses the place of whoever reads it, or has it read aloud.
_SCRIPT = f"""
setInterval(async () => {{
  try {{
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (answer.ok) document.querySelector("main").replaceWith(page.querySelector("main"));
  }} catch (error) {{ }}  // the server is gone, or will answer the next time
}}, {REFRESH_SECONDS * 1000});
"""


class RunsPage:
    """The runs below a folder, or of a database, as HTML, for any number of readers at once.

    Raises:
        DsplanError: it is no folder, and no database that can be read.
    """

    def __init__(self, where: str | Path) -> None:
        self._runs = runs_at(where)
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._html = ""

    def html(self) -> str:
        """Return the page as it is now, or was a few seconds ago."""
        with self._lock:
            if time.monotonic() - self._looked >= REFRESH_SECONDS:
                self._html = self._page()
                self._looked = time.monotonic()
            return self._html

    def _page(self) -> str:
        try:
            content = blocks_html(runs_blocks(self._runs.look()))
        except BrokenFile:
            content = "<p>The folder of the runs is gone.</p>"
        except DsplanError:
            content = "<p>The database of the runs does not answer.</p>"
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>dsplan runs</title><style>{style()}</style></head>"
            f'<body><main><h1>Runs</h1>{content}<p><a href="/">Questions</a></p></main>'
            f"<script>{_SCRIPT}</script></body></html>\n"
        )
