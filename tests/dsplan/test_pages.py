"""The pages of `dsplan report` and `dsplan ui` in a browser, and what other programs get of the latter's server.

They are in one file so that they share one browser: starting it costs as much as most of these tests.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil
import pytest

pytest.importorskip("plotly", reason="needs plotly (extra report)")
pytest.importorskip("playwright", reason="needs playwright (extra dev)")

from playwright.sync_api import expect

from dsplan.__main__ import main
from dsplan.question import Question
from dsplan.report.make import answer_page, sources_page
from dsplan.report.page import Page, page_html
from dsplan.report.run_data import read_run
from hardware_db.store import MemoryStore
from planner.calibration.learn import refresh
from planner.search.search import recommend
from tests.dsplan.browser import NARROW, WIDE, CheckedPage, OpenPage
from tests.dsplan.report.test_runs import run_directory
from tests.dsplan.run_directories import completed_run
from tests.dsplan.test_ui import AXOLOTL, LLAMA
from tests.planner.calibration.runs import HERE, User

# The checks see what they are there to see.


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


def test_words_of_pictures_that_overlap_or_are_cut_are_seen(tmp_path: Path, open_page: OpenPage) -> None:
    words = "".join(f"<text x='{x}' y='40'>{word}</text>" for word, x in (("well", 20), ("long", 150), ("over", 160)))
    cut = "<text x='380' y='80'>beyond the sheet</text>"
    picture = f"<div id='p' class='js-plotly-plot' style='width:400px'><svg width='900'>{words}{cut}</svg></div>"
    (tmp_path / "page.html").write_text(_PAGE.format(picture))
    assert open_page((tmp_path / "page.html").as_uri()).unreadable() == [
        "p: beyond the sheet is cut",
        "p: over over long",
    ]


# Reports.


HACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def question_page(directory: Path) -> Page:
    request = Question(model="facebook/opt-125m", gpus=2, gpu="A100-SXM4-80GB").request()
    return answer_page(recommend(request, with_front=True), f"dsplan report {HACK}")


def sources_of_all_kinds_page(directory: Path) -> Page:
    """Plans, runs and what was learnt on one page."""
    request = Question(model="facebook/opt-125m", gpus=2, gpu="A100-SXM4-80GB").request()
    runs = [read_run(run_directory(directory / name)) for name in ("first", HACK.replace("/", ""))]
    store = MemoryStore()
    store.add(*User().runs(8))
    return sources_page(recommend(request).plans[:2], runs, refresh(store, HERE, keep=False))


@pytest.mark.parametrize("write_page", [question_page, pytest.param(sources_of_all_kinds_page, marks=pytest.mark.slow)])
def test_a_report_is_drawn_reached_read_and_printed(
    write_page: Callable[[Path], Page], tmp_path: Path, open_page: OpenPage
) -> None:
    page = write_page(tmp_path)
    (tmp_path / "page.html").write_text(page_html(page), encoding="utf-8")
    checked = open_page((tmp_path / "page.html").as_uri(), width=NARROW)
    assert list(checked.pictures()) == [f"plot-{name}" for name in page.pictures]
    assert min(checked.pictures().values()) > 0
    assert checked.unreadable() == []
    assert checked.not_reached_by_tab() == []
    checked.page.locator("summary").first.click()  # all tables look alike, and axe-core takes long over each
    assert checked.problems() == []
    checked.changed_to(dark=True, width=WIDE)
    assert checked.problems(rule="color-contrast") == []
    assert checked.unreadable() == []
    assert checked.page.evaluate("window.hacked") is None
    on_paper(checked)


A4_PIXELS = 688
"""Between the margins of a sheet that is 210 mm wide."""


def on_paper(checked: CheckedPage) -> None:
    """A page that was read in the dark is printed on white, as wide as the paper, with nothing to click."""
    checked.page.evaluate("document.querySelectorAll('details').forEach(details => details.open = false)")
    checked.page.set_viewport_size({"width": A4_PIXELS, "height": 1000})
    checked.page.emulate_media(media="print")
    checked.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert checked.sideways() == 0
    assert checked.page.evaluate(_BEYOND_THE_PAPER) == []
    assert checked.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert checked.page.locator("details:not([open])").count() == 0
    colours = checked.page.evaluate(
        "[...new Set([...document.querySelectorAll('.plot text')].map(text => getComputedStyle(text).fill))]"
    )
    assert colours == ["rgb(0, 0, 0)"]


_BEYOND_THE_PAPER = """() => [...document.querySelectorAll('main *')]
  .filter(element => element.getBoundingClientRect().right > innerWidth + 1 && !element.closest('defs, clipPath'))
  .map(element => element.outerHTML.slice(0, 120))"""


# `dsplan ui`, in a browser.


ROOT = Path(__file__).parents[2]
START_SECONDS = 120
SMALL = "model=opt-125m&gpus=2&gpu=A100-SXM4-80GB"

# Every Python that the server starts says whom it wants to reach: a socket's address, or a name to look up.
_LISTENER = """
import os, sys
def _seen(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        with open({log!r}, "a") as log:
            print(event, arguments[-1] if event in ("socket.connect", "socket.sendto") else arguments[0], file=log)
sys.addaudithook(_seen)
"""


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process
    reached: Path
    """What its processes wanted to reach, a line for each."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`dsplan ui` on two processes."""
    pytest.importorskip("gradio", reason="needs gradio (extra ui)")
    directory = tmp_path_factory.mktemp("ui")
    (directory / "sitecustomize.py").write_text(_LISTENER.format(log=str(directory / "reached")))
    (directory / "reached").touch()
    completed_run(directory / "runs" / "<b>ann", at=0.0, seconds=100.0, count=50)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsplan", "ui", "--port", str(port), "--workers", "2", "--runs", "runs"],
            env={**os.environ, "PYTHONPATH": paths, "DSPLAN_HOME": str(directory / "home"), "TMPDIR": str(directory)},
            stdout=log,
            stderr=log,
            cwd=directory,
        )
        try:
            url = f"http://127.0.0.1:{port}/"
            _wait_for(url, process)
            yield Server(url, psutil.Process(process.pid), directory / "reached")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert "Traceback" not in (directory / "log").read_text()
        finally:
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no page within {START_SECONDS} seconds")


def shown(checked: CheckedPage) -> CheckedPage:
    """The page once its first answer is there."""
    expect(checked.page.locator("#plans :is(table, [role=alert])").first).to_be_visible()
    return checked


def test_runs_have_a_page_of_their_own(server: Server, open_page: OpenPage) -> None:
    checked = open_page(f"{server.url}runs")
    assert checked.page.title() == "dsplan runs"
    cells = checked.page.locator("tbody td").all_inner_texts()
    assert cells[:4] == ["<b>ann", "ended", "50", "2.5000"]
    assert not checked.violations()
    completed_run(server.reached.parent / "runs" / "bob", at=9.0, seconds=100.0, count=7)
    expect(checked.page.get_by_text("2 runs: 2 ended")).to_be_visible(timeout=30_000)
    assert not checked.complaints
    assert not checked.outside


PARTS = ("Hardware", "Work", "Goal", "Another model")


@pytest.mark.parametrize("looks_at_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_everything_on_a_page_can_be_seen_and_reached(looks_at_all: bool, server: Server, open_page: OpenPage) -> None:
    """axe-core takes seconds over a view, the Tab key over all controls: the suite has axe-core look at the first view
    in the light, the long checks do all."""
    checked = shown(open_page(f"{server.url}?{SMALL}"))
    page = checked.page
    assert page.title() == "dsplan"
    for picture in ("memory", "seconds", "step", "trade"):
        expect(page.locator(f"#picture-{picture} .trace path").first).to_be_attached()
    assert sorted(checked.pictures()) == [f"picture-{name}" for name in ("memory", "seconds", "step", "trade")]
    assert min(checked.pictures().values()) >= 2
    if looks_at_all:
        assert checked.not_reached_by_tab() == []
    for part in PARTS:
        page.get_by_role("button", name=part).click()
    for number, view in enumerate(views(checked)):
        if looks_at_all or not number:
            assert checked.problems(within="#views" if number else None) == [], view
    checked.changed_to(dark=True, width=NARROW)
    # The pictures were hidden behind the last view while the window became narrow.
    page.get_by_role("tab", name="Pictures").click()
    page.wait_for_function("[...document.querySelectorAll('.main-svg')].every(svg => svg.clientWidth < innerWidth)")
    assert checked.unreadable() == []
    for number, view in enumerate(views(checked)):
        if looks_at_all:
            assert checked.problems(within="#views" if number else None, rule="color-contrast") == [], view


def views(checked: CheckedPage) -> Iterator[str]:
    """Show every view of an answer, all that opens in it opened."""
    for view in checked.page.get_by_role("tab").all():
        view.click()
        expect(view).to_have_attribute("aria-selected", "true")
        checked.page.evaluate("document.querySelectorAll('#views details').forEach(part => part.open = true)")
        yield view.inner_text()


@pytest.mark.slow
def test_a_changed_field_changes_the_answer_and_what_a_stranger_adds_is_text(
    server: Server, open_page: OpenPage
) -> None:
    checked = shown(open_page(f"{server.url}?{SMALL}", permissions=["clipboard-read", "clipboard-write"]))
    page = checked.page
    page.get_by_label("GPUs in total").fill("4")
    expect(page.locator("#plans")).to_contain_text("4 x A100-SXM4-80GB")
    page.get_by_label("Sequence length").fill("1k")
    page.get_by_label("Sequence length").press("Enter")
    expect(page.locator("#plans")).to_contain_text("sequence 1024")
    page.get_by_label("Method").click()
    page.get_by_role("option", name="qlora").click()
    expect(page.locator("#command")).to_contain_text("--method qlora")
    page.get_by_label("2. ").check()
    page.get_by_role("tab", name="Configs").click()
    expect(page.locator("#files a.download")).to_have_attribute("href", re.compile("plan=2$"))
    page.wait_for_url("**plan=2**")
    assert page.url.endswith("gpus=4&gpu=A100-SXM4-80GB&seq-len=1024&method=qlora&plan=2")
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == page.url

    parts = ("#plans", "#files", "#command")
    before = [page.locator(part).inner_text() for part in parts]
    page.goto(f"{page.url}&{quote(HACK)}=1")
    shown(checked)
    expect(page.get_by_label("2. ")).to_be_checked()
    page.get_by_role("tab", name="Configs").click()
    expect(page.locator("#plans")).to_contain_text("<img src=x")
    after = [page.locator(part).inner_text() for part in parts]
    assert after[1:] == before[1:]
    assert after[0].endswith(before[0])
    assert page.get_by_label("Sequence length").input_value() == "1024"
    assert page.evaluate("window.hacked") is None


_DROP = """([name, text]) => {
  const files = new DataTransfer()
  files.items.add(new File([text], name))
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }))
}"""


@pytest.mark.slow
def test_a_file_that_is_dropped_or_chosen_is_checked_and_asked(
    server: Server, open_page: OpenPage, tmp_path: Path
) -> None:
    checked = shown(open_page(f"{server.url}?{SMALL}"))
    page = checked.page
    page.evaluate(_DROP, ["train.yaml", AXOLOTL])
    expect(page.locator("#check h2")).to_contain_text("train.yaml: does not fit")
    page.wait_for_url("**seq-len=2048**")
    assert page.get_by_label("Sequence length").input_value() == "2048"
    assert page.get_by_label("Model", exact=True).input_value() == "meta-llama/Llama-3.1-8B"
    expect(page.locator("#plans")).to_contain_text("Llama-3.1-8B")
    assert checked.problems(within="#check") == []
    (tmp_path / f"{HACK.replace('/', '')}.yaml").write_text(f"{HACK}: [1")
    (broken,) = tmp_path.iterdir()
    page.get_by_label("A trainer's own config").set_input_files(broken)
    expect(page.locator("#check [role=alert]")).to_contain_text("is not YAML")
    assert page.evaluate("window.hacked") is None
    assert page.get_by_label("Sequence length").input_value() == "2048"


@pytest.mark.slow
def test_strange_names_and_configs_are_text_or_refused(server: Server, open_page: OpenPage) -> None:
    checked = shown(open_page(f"{server.url}?{SMALL}"))
    page = checked.page
    field, alert = page.get_by_label("Model", exact=True), page.get_by_role("alert")
    for name, words in (
        (HACK, "unknown model '<img src=x onerror=\"window"),
        ("\x1b[31mred\x1b[0m", "write it in letters that can be seen"),
        ("x" * 2**14, "write at most 100 characters"),
    ):
        field.fill(name)
        field.press("Enter")
        field.blur()
        expect(alert).to_contain_text(words)
        assert len(alert.inner_text()) < 400
    page.get_by_role("button", name="Another model").click()
    for config, words in (
        (json.dumps({**LLAMA, "model_type": HACK}), "<img src=x"),
        ("[" * 10_000, "nested"),
        ("x" * (2**17 + 1), "larger than 128 KiB"),
    ):
        page.get_by_label("config.json").fill(config)
        page.get_by_label("config.json").blur()
        expect(alert).to_contain_text(words)
    page.get_by_label("config.json").fill(json.dumps(LLAMA | {"_name_or_path": HACK}))
    page.get_by_label("config.json").blur()
    expect(page.locator("#plans")).to_contain_text("config.json: ")
    page.wait_for_url("**?config=**")
    assert "config.json: " in answer_to(server, urlsplit(page.url).query)
    assert page.evaluate("window.hacked") is None
    assert checked.problems() == []


# What other programs get.


def fetched(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read()


def test_the_files_are_those_of_the_command_line(server: Server, tmp_path: Path) -> None:
    line = ["recommend", "--model", "opt-125m", "--gpus", "2", "--gpu", "A100-SXM4-80GB", "--out", str(tmp_path)]
    assert main(line) == 0
    _, packed = fetched(f"{server.url}files?{SMALL}&plan=2")
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    folder = tmp_path / "plan-2"
    written = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert files == {"plan.yaml": (tmp_path / "plan-2.yaml").read_text(), **written}
    name = next(name for name in files if name.startswith("torchrun/"))
    assert fetched(f"{server.url}files?{SMALL}&plan=2&file={name}") == (200, files[name].encode())
    status, text = fetched(f"{server.url}files?{SMALL}&plan=77")
    assert (status, b"there is no plan 77" in text) == (400, True)


def test_a_report_is_to_be_had_with_every_curve(server: Server) -> None:
    status, page = fetched(f"{server.url}report?{SMALL}")
    assert status == 200
    assert b"<title>" in page
    assert b"Throughput over GPUs" in page
    assert fetched(f"{server.url}report?model=/etc/passwd") == (400, fetched(f"{server.url}files?model=/etc/passwd")[1])


@pytest.mark.parametrize(
    "path",
    [
        "gradio_api/file=/etc/passwd",
        "gradio_api/file=pyproject.toml",
        "static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "assets/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        f"files?{SMALL}&file=/etc/passwd",
        f"files?{SMALL}&file=../../../etc/passwd",
        "files?model=/etc/passwd",
        "gradio_api/proxy=http://127.0.0.1:1/",
    ],
)
def test_no_file_of_the_machine_is_to_be_had(server: Server, path: str) -> None:
    status, text = fetched(server.url + path)
    assert 400 <= status < 500
    assert b"root:" not in text
    assert b"[project]" not in text


def test_neither_the_page_nor_an_answer_names_a_place_on_the_machine(server: Server) -> None:
    texts = [fetched(server.url + path)[1].decode() for path in ("", "config", "gradio_api/info", "theme.css")]
    texts.append(answer_to(server, SMALL))
    for folder in (str(ROOT), str(server.reached.parent), sys.prefix, str(Path.home()) + "/"):
        assert not [text for text in texts if folder in text and folder != "/"]


def answer_to(server: Server, query: str) -> str:
    """Return what the page's first request brings, as a program asks for it."""
    config = json.loads(fetched(f"{server.url}config")[1])
    number = next(entry["id"] for entry in config["dependencies"] if entry["targets"][0][1] == "load")
    session = uuid.uuid4().hex
    body = json.dumps({"data": [], "fn_index": number, "session_hash": session}).encode()
    request = urllib.request.Request(
        f"{server.url}gradio_api/queue/join?{query}", body, {"content-type": "application/json"}
    )
    urllib.request.urlopen(request).close()
    with urllib.request.urlopen(f"{server.url}gradio_api/queue/data?session_hash={session}") as events:
        for line in events:
            if b'"process_completed"' in line:
                return line.decode()
    raise AssertionError("no answer")


@pytest.mark.slow
def test_eight_at_once_have_their_own_answers_of_the_same_processes(server: Server) -> None:
    """`scripts/bench/ui.py` has the seconds."""
    before = processes_of(server)
    questions = {gpus: f"model=llama-2-7b&gpus={gpus}&gpu=H100-SXM5-80GB" for gpus in range(8, 72, 8)}
    with ThreadPoolExecutor(8) as users:
        texts = dict(zip(questions, users.map(lambda query: answer_to(server, query), questions.values()), strict=True))
    assert all(f"{gpus} x H100-SXM5-80GB" in text for gpus, text in texts.items())
    assert processes_of(server) == before


def processes_of(server: Server) -> set[int]:
    return {process.pid for process in (server.process, *server.process.children(recursive=True))}


def test_the_server_reached_nobody(server: Server) -> None:
    """Stands last: by now the page was opened and asked in every way."""
    reached = server.reached.read_text().splitlines()
    strange = [line for line in reached if not any(name in line for name in ("127.0.0.1", "localhost", "::1"))]
    assert strange == []


def test_a_taken_port_is_said_in_one_line(server: Server) -> None:
    port = server.url.rpartition(":")[2].strip("/")
    finished = subprocess.run(
        [sys.executable, "-m", "dsplan", "ui", "--port", port],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert f"no page can be served at 127.0.0.1:{port}" in finished.stderr
