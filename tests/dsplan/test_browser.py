"""The checks of pages see what they are there to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsplan.browser import NARROW, OpenPage

_PAGE = "<!doctype html><html lang='en'><head><title>A page</title></head><body><main>{}</main></body></html>"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("<h1>all is well</h1><a href='#'>a link</a>", ""),
        ("<h1>x</h1><p style='color:#aaa'>too faint to read</p>", "color-contrast at p"),
        ("<h1>x</h1><input>", "label at input"),
        ("<h1>x</h1><img alt='' src='http://192.0.2.1/picture.png'>", "asks for http://192.0.2.1/picture.png"),
        ("<h1>x</h1><script>console.error('so wrong')</script>", "error in the console: so wrong"),
        ("<h1>x</h1><script>none.such()</script>", "exception: none is not defined"),
        ("<h1>x</h1><div style='width:500px'>wide</div>", "pixels too wide"),
    ],
    ids=["well", "contrast", "label", "outside", "console", "exception", "wide"],
)
def test_a_page_with_a_fault_is_seen(tmp_path: Path, open_page: OpenPage, content: str, problem: str) -> None:
    (tmp_path / "page.html").write_text(_PAGE.format(content))
    problems = open_page((tmp_path / "page.html").as_uri(), width=NARROW).problems()
    assert problem in "\n".join(problems) if problem else not problems


def test_a_control_that_no_key_reaches_is_seen(tmp_path: Path, open_page: OpenPage) -> None:
    trap = "<h1>x</h1><a href='#'>first</a><button id='trap'>trap</button><button id='beyond'>beyond</button>"
    escape = "<script>trap.onkeydown = event => event.preventDefault()</script>"
    (tmp_path / "page.html").write_text(_PAGE.format(trap))
    (tmp_path / "trapped.html").write_text(_PAGE.format(trap + escape))
    assert open_page((tmp_path / "page.html").as_uri()).not_reached_by_tab() == []
    assert ["beyond" in html for html in open_page((tmp_path / "trapped.html").as_uri()).not_reached_by_tab()] == [True]
