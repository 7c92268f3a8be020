"""Draws the screenshots of the docs anew, from real answers.

    python -m scripts.generate.screenshots [terminal | pages ...]

Pages need the extras `ui`, `report` and `dev`, and Chromium; what a terminal of 80 columns shows is written as SVG and
needs a pseudo-terminal, and torch for the run that is watched. Fonts differ between machines, so nothing compares the
files.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from html import escape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dsplan.__main__ import main as run
from dsplan.ui.pieces import PICTURES
from scripts.bench.ui import server
from tests.dsplan.browser import NARROW, WIDE, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
QUESTION = "?model=llama-3-8b&gpus=8&gpu=H100-SXM5-80GB"
PAGES = {"page.png": (WIDE, "light"), "page-phone.png": (NARROW, "dark")}
"""Pixels of the window and the colours, by file."""


REPORT = ("--model", "llama-3-8b", "--gpus", "8", "--gpu", "H100-SXM5-80GB")
REPORTS = {"report.png": (WIDE, "light", 2300), "report-phone.png": (NARROW, "dark", 2400)}
"""Also how many pixels of the page from its top."""


def reports(browser: Browser) -> None:
    """Draw the pages of `dsplan report`."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        if run(["report", *REPORT, "--out", str(file)]):
            raise SystemExit("dsplan report has no plan for the picture")
        for name, (width, colours, height) in REPORTS.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=colours)
            page.goto(file.as_uri())
            page.locator("#plot-pareto .trace path").first.wait_for()
            clip = {"x": 0, "y": 0, "width": width, "height": height}
            page.screenshot(path=FOLDER / name, clip=clip, full_page=True)
            page.close()


COLUMNS = 80
MODEL = "--model llama-3-8b --gpus 8 --gpu H100-SXM5-80GB"
COMMANDS = {
    "recommend.svg": f"recommend {MODEL} --plot",
    "estimate.svg": f"estimate {MODEL} --strategy fsdp",
}
WATCHED = ("run", "--strategy", "fsdp", "--nproc", "2", "--run-dir")
WATCHED_SCRIPT = ("scripts/examples/train_gpt.py", "--steps", "400")
WATCHED_STEPS = 120
"""Of the run, when it is looked at."""
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
.title {{ font-size: 16px; fill: #9a9a9a; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect fill="#0c0c0c" width="{width}" height="{height}" rx="8"/>
<text class="title" x="{terminal_x}" y="27">$ COMMAND</text>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's picture of a terminal with the reader's own fonts: its template fetches some from a network."""


def terminals() -> None:
    """Draw what commands show on a terminal."""
    for name, command in COMMANDS.items():
        draw(name, command.split())
    watched()


def watched() -> None:
    """`dsplan watch` of a run of two ranks on this machine."""
    with TemporaryDirectory() as folder:
        directory = str(Path(folder) / "run")
        command = [sys.executable, "-m", "dsplan", *WATCHED, directory, *WATCHED_SCRIPT]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            rows = Path(directory) / "metrics-rank0.jsonl"
            while not rows.exists() or rows.read_text().count('"event": "step"') < WATCHED_STEPS:
                if training.poll() is not None:
                    raise SystemExit(f"the run that is to be watched ended early ({training.returncode})")
                time.sleep(0.2)
            draw("watch.svg", ["watch", directory, "--once"], shown="watch runs/last --once")
        finally:
            training.terminate()
            training.wait()


def draw(name: str, arguments: list[str], shown: str = "") -> None:
    """Write what `dsplan` with these arguments prints on a terminal as a picture; `shown` stands for the arguments."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(width=COLUMNS, record=True, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(on_a_terminal(arguments)))
    picture = _SVG.replace("COMMAND", escape(f"dsplan {shown or ' '.join(arguments)}"))
    svg = console.export_svg(theme=MONOKAI, code_format=picture, unique_id=name.removesuffix(".svg"))
    (FOLDER / name).write_text(svg)


def on_a_terminal(arguments: list[str]) -> str:
    """Return what `dsplan` writes on a terminal of so many columns, colours and all."""
    import fcntl
    import struct
    import termios

    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    for unwanted in ("COLUMNS", "NO_COLOR"):
        variables.pop(unwanted, None)
    started = subprocess.Popen(
        [sys.executable, "-m", "dsplan", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=variables,
    )
    os.close(theirs)
    written = b""
    with suppress(OSError):  # how Linux ends a terminal
        while read := os.read(own, 1 << 16):
            written += read
    os.close(own)
    if started.wait() not in (0, 1):
        raise SystemExit(f"dsplan {' '.join(arguments)} ended with {started.returncode}")
    return re.sub(r"\x1b\[\?25[hl]", "", written.decode()).replace("\r\n", "\n")


def main() -> None:
    """Draw all pictures."""
    wanted = sys.argv[1:] or ["terminal", "pages"]
    FOLDER.mkdir(exist_ok=True)
    if "terminal" in wanted:
        terminals()
    if "pages" in wanted:
        pages()


def pages() -> None:
    """Draw the page of `dsplan ui`, and those of `dsplan report`."""
    from playwright.sync_api import sync_playwright

    with server(cores=2) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--disable-dev-shm-usage"])
        for file, (width, colours) in PAGES.items():
            page = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=colours, reduced_motion="reduce"
            )
            page.goto(url + QUESTION)
            for name in PICTURES:
                page.locator(f"#picture-{name} .trace path").first.wait_for()
            page.screenshot(path=FOLDER / file, full_page=True)
            page.close()
        reports(browser)
        browser.close()


if __name__ == "__main__":
    main()
