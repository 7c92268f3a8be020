"""Draws the screenshots of the docs anew, from real answers: `python -m scripts.generate.screenshots`.

Needs the extras `ui` and `dev`, and Chromium. Fonts differ between machines, so nothing compares the files.
"""

from __future__ import annotations

from pathlib import Path

from dsplan.ui.pieces import PICTURES
from scripts.bench.ui import server
from tests.dsplan.browser import NARROW, WIDE, chromium

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
QUESTION = "?model=llama-3-8b&gpus=8&gpu=H100-SXM5-80GB"
PAGES = {"page.png": (WIDE, "light"), "page-phone.png": (NARROW, "dark")}
"""Pixels of the window and the colours, by file."""


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
        browser.close()


if __name__ == "__main__":
    main()
