"""Draws the screenshots of the docs anew, from real answers: `python -m scripts.generate.screenshots`.

Needs the extras `ui`, `report` and `dev`, and Chromium. Fonts differ between machines, so nothing compares the files.
"""

from __future__ import annotations

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
    """The pages of `dsplan report`."""
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


def main() -> None:
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
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
