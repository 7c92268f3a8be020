"""Pages in a real browser: one Chromium for the session, and what must hold of every page that dsplan makes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

NARROW, WIDE = 390, 1280
"""Pixels: a phone held upright, and a window on a laptop."""

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_LOCAL_SCHEMES = ("data", "blob", "about")
_MOST_STOPS = 200
_PATIENCE_MILLISECONDS = 60_000
"""A loaded machine takes seconds for what otherwise takes a tenth of one."""


@dataclass(kw_only=True)
class CheckedPage:
    """A page in the browser, and all that it complained of and asked for since it was opened."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, exceptions, and answers of the server that say it has no such thing."""
    outside: list[str] = field(default_factory=list)
    """Addresses of other origins that the page asked for; none of them was answered."""

    def violations(self, within: str | None = None, rule: str | None = None) -> list[str]:
        """Return what axe-core finds, each rule with the element: in a part of the page alone, or of one rule alone."""
        from axe_playwright_python.sync_playwright import Axe

        # All of a page's elements that are well, with their selectors, would take longer than the checks.
        options = {"resultTypes": ["violations"], **({"runOnly": {"type": "rule", "values": [rule]}} if rule else {})}
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(Axe().axe_script)
        script = "([context, options]) => axe.run(context ?? document, options).then(checked => checked.violations)"
        violations = []
        for violation in self.page.evaluate(script, [within, options]):
            for node in violation["nodes"]:
                why = " ".join(node["failureSummary"].split())
                violations.append(f"{violation['id']} at {node['target'][-1]}: {why} {node['html'][:200]}")
        return violations

    def changed_to(self, *, dark: bool, width: int) -> None:
        """Show the same page in other colours and in another window, without loading it again."""
        self.page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion="reduce")
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.evaluate("() => new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn, 200)))")

    def sideways(self) -> int:
        """Pixels by which the page is wider than its window."""
        script = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(script))

    def not_reached_by_tab(self) -> list[str]:
        """Visible controls that the Tab key never comes to, each as the beginning of its HTML. A group of radio buttons
        is one stop, as browsers have it."""
        self.page.evaluate(_MARK_CONTROLS)
        self.page.evaluate("document.activeElement.blur()")
        nowhere = 0
        for _ in range(_MOST_STOPS):
            self.page.keyboard.press("Tab")
            stop = self.page.evaluate(_MARK_FOCUSED)
            # A list that opens below its field is a stop too, and closes as the focus comes: it is nowhere for once.
            nowhere = nowhere + 1 if stop == "nowhere" else 0
            if stop == "again" or nowhere > 1:
                break
        self.page.keyboard.press("Escape")
        self.page.evaluate("document.activeElement.blur()")
        return list(self.page.evaluate(_NOT_REACHED))

    def pictures(self) -> dict[str, int]:
        """The plotly pictures of the page by title, else by the id of what they are in: how many marks take up room."""
        return dict(self.page.evaluate(_PICTURES))

    def unreadable(self) -> list[str]:
        """Words in pictures that others overlap, or that the picture cuts."""
        return list(self.page.evaluate(_UNREADABLE))

    def problems(self, within: str | None = None, rule: str | None = None) -> list[str]:
        """All that must not be on any page: complaints, requests to elsewhere, violations, scrolling sideways."""
        wide = [f"{self.sideways()} pixels too wide"] if self.sideways() > 0 else []
        requests = [f"asks for {address}" for address in self.outside]
        return [*self.complaints, *requests, *wide, *self.violations(within, rule)]


_MARK_CONTROLS = """() => {
  const selector = 'a[href], button, input, select, textarea, summary, [tabindex]:not([tabindex="-1"])'
  window.controls = new Set([...document.querySelectorAll(selector)].filter(control =>
    control.checkVisibility({opacityProperty: true, visibilityProperty: true}) && !control.disabled
    && control.tabIndex >= 0 && control.getClientRects().length > 0))
  window.stops = new Set()
}"""
_MARK_FOCUSED = """() => {
  const focused = document.activeElement
  if (focused === document.body) return 'nowhere'
  if (window.stops.has(focused)) return 'again'
  window.stops.add(focused)
  return 'new'
}"""
_NOT_REACHED = """() => {
  const group = control => control.type === 'radio' && control.closest('fieldset, [role=radiogroup]')
  const groups = new Set([...window.stops].map(group).filter(Boolean))
  return [...window.controls]
    .filter(control => control.isConnected && !window.stops.has(control) && !groups.has(group(control)))
    .map(control => control.outerHTML.slice(0, 160))
}"""
_PICTURES = """() => [...document.querySelectorAll('.js-plotly-plot')].map((plot, number) => {
  const marks = [...plot.querySelectorAll('.trace :is(path, rect, circle), .heatmaplayer image')]
  const drawn = marks.filter(mark => { const box = mark.getBoundingClientRect(); return box.width + box.height > 0 })
  return [plot.layout?.title?.text || plot.closest('[id]')?.id || `${number}`, drawn.length]
})"""

_UNREADABLE = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const sheet = plot.getBoundingClientRect()
  const words = [...plot.querySelectorAll('svg text')].filter(text => text.textContent.trim() && text.checkVisibility())
    .flatMap(text => {
      const lines = [...text.querySelectorAll('tspan.line')]
      return lines.length ? lines : [text]
    })
    .map(text => [text.textContent, text.getBoundingClientRect()])
  const cut = words.filter(([_, box]) => box.left < sheet.left - 1 || box.right > sheet.right + 1
    || box.top < sheet.top - 1 || box.bottom > sheet.bottom + 1)
  const apart = (a, b) => a.right - 1 < b.left || b.right - 1 < a.left || a.bottom - 3 < b.top || b.bottom - 3 < a.top
  const over = words.flatMap(([text, box], index) => words.slice(index + 1)
    .filter(([_, other]) => !apart(box, other)).map(([other]) => `${other} over ${text}`))
  return [...cut.map(([text]) => `${text} is cut`), ...over].map(said => `${plot.id}: ${said}`)
})"""


def chromium() -> str | None:
    """The path of the system's Chromium, None if it has none."""
    return next((path for program in _PROGRAMS if (path := shutil.which(program))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, without a window."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    path = chromium()
    if path is None:
        pytest.skip(f"needs one of {', '.join(_PROGRAMS)} (Debian: apt install chromium)")
    sync_api.expect.set_options(timeout=_PATIENCE_MILLISECONDS)
    with sync_api.sync_playwright() as playwright:
        # Chromium's own calls home are none of the page's; containers share 64 MiB of memory, too little for a page.
        quiet = ("--disable-background-networking", "--disable-component-update", "--no-proxy-server")
        running = playwright.chromium.launch(executable_path=path, args=[*quiet, "--disable-dev-shm-usage"])
        yield running
        running.close()


OpenPage = Callable[..., CheckedPage]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages that are closed after the test: `open_page(url, width=390, dark=True)`."""
    contexts = []

    def opened(url: str, *, width: int = WIDE, dark: bool = False, **options: Any) -> CheckedPage:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            **options,
        )
        context.set_default_timeout(_PATIENCE_MILLISECONDS)
        contexts.append(context)
        checked = CheckedPage(page=context.new_page())
        _watch(checked, url)
        checked.page.goto(url)
        return checked

    yield opened
    for context in contexts:
        context.close()


def _watch(checked: CheckedPage, url: str) -> None:
    """Notes complaints of the page, and stops what it asks of other origins."""
    page, own = checked.page, _origin(url)

    def noted(message: Any) -> None:
        if message.type in ("error", "warning"):
            checked.complaints.append(f"{message.type} in the console: {message.text}")

    def judged(route: Any, request: Request) -> None:
        if urlsplit(request.url).scheme in _LOCAL_SCHEMES or _origin(request.url) == own:
            route.continue_()
        else:
            checked.outside.append(request.url)
            route.abort()

    page.on("console", noted)
    page.on("pageerror", lambda error: checked.complaints.append(f"exception: {error}"))
    page.context.route("**/*", judged)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
