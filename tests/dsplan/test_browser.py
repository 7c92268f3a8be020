"""The checks of pages see what they are there to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsplan.browser import NARROW, OpenPage

_PAGE = "<!doctype html><html lang='en'><head><title>A page</title></head><body><main>{}</main></body></html>"


FAULTS = {
    "<p style='color:#aaa'>too faint to read</p>": "color-contrast at p",
    "<input>": "label at input",
    "<img alt='' src='http://192.0.2.1/picture.png'>": "asks for http://192.0.2.1/picture.png",
    "<script>console.error('so wrong')</script>": "error in the console: so wrong",
    "<script>none.such()</script>": "exception: none is not defined",
    "<div style='width:500px'>wide</div>": "pixels too wide",
}


def test_every_fault_of_a_page_is_seen_and_none_where_there_is_none(tmp_path: Path, open_page: OpenPage) -> None:
    (tmp_path / "page.html").write_text(_PAGE.format("<h1>x</h1>" + "".join(FAULTS)))
    (tmp_path / "well.html").write_text(_PAGE.format("<h1>all is well</h1><a href='#'>a link</a>"))
    problems = open_page((tmp_path / "page.html").as_uri(), width=NARROW).problems()
    assert [fault for fault in FAULTS.values() if not any(fault in problem for problem in problems)] == []
    assert open_page((tmp_path / "well.html").as_uri(), width=NARROW).problems() == []


def test_a_control_that_no_key_reaches_is_seen(tmp_path: Path, open_page: OpenPage) -> None:
    trap = "<h1>x</h1><a href='#'>first</a><button id='trap'>trap</button><button id='beyond'>beyond</button>"
    escape = "<script>trap.onkeydown = event => event.preventDefault()</script>"
    (tmp_path / "page.html").write_text(_PAGE.format(trap))
    (tmp_path / "trapped.html").write_text(_PAGE.format(trap + escape))
    assert open_page((tmp_path / "page.html").as_uri()).not_reached_by_tab() == []
    assert ["beyond" in html for html in open_page((tmp_path / "trapped.html").as_uri()).not_reached_by_tab()] == [True]


def test_marks_of_a_picture_are_counted(tmp_path: Path, open_page: OpenPage) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    empty = graph_objects.Figure().to_html(include_plotlyjs=True, div_id="empty")
    bars = graph_objects.Figure(graph_objects.Bar(y=[1, 2, 0]), {"title": {"text": "bars"}})
    content = f"<h1>x</h1>{empty}{bars.to_html(include_plotlyjs=False, full_html=False)}"
    (tmp_path / "page.html").write_text(_PAGE.format(content), "utf-8")
    assert open_page((tmp_path / "page.html").as_uri()).pictures() == {"empty": 0, "bars": 3}
