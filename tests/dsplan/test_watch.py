"""A run seen from another terminal: figures, curves, and texts that a terminal must not obey."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from dsplan.__main__ import main
from dsplan.render.charts import sparkline
from dsplan.render.recent_rows import RecentRows
from dsplan.render.run_view import RunView, step_line
from dsplan.render.show import Text, plain_text, renderables
from dsplan.render.table_columns import Table as ShownTable
from dsplan.render.table_columns import columns
from dsplan.render.watch_view import Frame, RunWatch
from hardware_db.notices import MOST_LETTERS, printable
from strategies.launch.attempt import StepDone
from strategies.launch.run_lock import RunLock
from tests.dsplan.cli import Cli


def test_a_line_rises_and_falls_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▄▄"
    assert sparkline([1.0, None, math.nan, 2.0], 4) == "▁  █"
    assert sparkline([0.1 + 0.2, 0.3, 0.3], 3) == "▄▄▄"
    assert sparkline([0, 5], 8, unicode=False) == "_#"
    assert sparkline([], 8) == sparkline([None], 8) == ""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return what two ranks of an engine have written after four steps."""
    directory = tmp_path / "run"
    directory.mkdir()
    for rank in range(2):
        rows = [
            {"event": "step", "step": step, "global_step": step + 1, "loss": 4.0 - step + rank, "seconds": 0.5}
            | {"samples": 2, "tokens": 64, "peak_bytes": (3 << 20) - step, "measured_by": "allocator"}
            for step in range(4)
        ]
        rows.append({"event": "machine", "time": time.time(), "gpu_utilization_percent": 93})
        (directory / f"metrics-rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        beat = {"rank": rank, "host": "\x1b[31mnode<b>", "section": "backward", "time": time.time(), "has_ended": False}
        (directory / f"rank{rank}.heartbeat").write_text(json.dumps(beat))
    return directory


def test_what_ranks_have_written_is_shown(cli: Cli, run: Path) -> None:
    document = cli(f"watch '{run}' --steps 100 --json").json
    assert (document["step"], document["steps"], document["step_seconds"], document["loss"]) == (4, 100, 0.5, 1.5)
    assert document["seconds_left"] is None  # nobody runs
    assert [rank["peak_bytes"] for rank in document["ranks"]] == [3 << 20, 3 << 20]
    assert [rank["gpu_utilization_percent"] for rank in document["ranks"]] == [93, 93]
    shown = cli(f"watch '{run}'").out
    assert "loss      #=-_ 1.5000 (1.5000 to 4.5000)" in shown
    assert "3.0 MiB" in shown
    assert "93%" in shown


def test_a_directory_without_a_run_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    refusal = cli.refuses(f"watch '{tmp_path}'")
    assert "is no run directory" in refusal
    assert f"they lie below {os.environ['DSPLAN_HOME']}/runs" in refusal


ALERTED = 7


def test_memory_is_the_highest_of_the_attempt_wherever_it_was_measured(cli: Cli, run: Path) -> None:
    with (run / "metrics-rank0.jsonl").open("a") as file:
        rows: list[dict[str, object]] = [{"event": "attempt", "attempt": 1}]
        rows += [{"event": "step", "step": step, "global_step": 5 + step, "seconds": 0.5} for step in range(300)]
        rows[1]["peak_bytes"] = 1 << 20
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert [rank["peak_bytes"] for rank in cli(f"watch '{run}' --json").json["ranks"]] == [1 << 20, 3 << 20]


def test_a_new_attempt_is_where_it_is_and_not_where_the_last_one_was(cli: Cli, run: Path) -> None:
    with (run / "run.jsonl").open("w") as file:
        for attempt in (0, 1):
            row = {"event": "attempt", "attempt": attempt, "time": time.time() - 100 + 60 * attempt, "ranks": 2}
            file.write(json.dumps(row) + "\n")
    for rank in range(2):
        with (run / f"metrics-rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"event": "attempt", "attempt": 1}) + "\n")
            file.write(json.dumps({"event": "step", "step": 0, "global_step": 2, "seconds": 0.5}) + "\n")
    assert cli(f"watch '{run}' --steps 100 --json").json["step"] == 2


@pytest.fixture
def wide_run(run: Path) -> Path:
    """A running one of 64 ranks, one of which is silent, with an alert before many checkpoints."""
    row = json.loads((run / "metrics-rank0.jsonl").read_text().splitlines()[-2])
    for rank in range(64):
        rows = [row | {"global_step": 4 + step} for step in range(4)]
        rows.append({"event": "machine", "time": time.time(), "gpu_utilization_percent": 90 + rank % 8})
        (run / f"metrics-rank{rank}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        silent = 300 if rank == 61 else 0
        beat = {"host": f"node-{rank // 8}", "section": "forward", "time": time.time() - silent, "has_ended": False}
        (run / f"rank{rank}.heartbeat").write_text(json.dumps(beat))
    message = f"rank {ALERTED} takes 312 ms for reading its batch where others take 195 ms, of 740 ms per step"
    alert = {"event": "alert", "kind": "straggler", "message": message, "step": 5, "rank": ALERTED}
    journal = [{"event": "attempt", "attempt": 0, "time": 0.0, "ranks": 64}, {**alert, "time": 9.0}]
    journal += [{"event": "saved", "time": 10.0 + step, "step": step} for step in range(20)]
    (run / "run.jsonl").write_text("".join(json.dumps(each) + "\n" for each in journal))
    return run


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 20), (40, 12), (120, 40), (200, 60), (200, 90)])
def test_a_page_shows_what_is_wrong_on_a_terminal_of_any_size(wide_run: Path, width: int, height: int) -> None:
    from rich.console import Console

    from dsplan.render.live_frames import page

    with RunLock(wide_run):
        frame = RunWatch(wide_run, steps=1000).look()
    console = Console(width=width, height=height, file=io.StringIO(), legacy_windows=False, _environ={})
    console.print(page(frame, console))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue().splitlines()
    shown = " ".join(" ".join(drawn).split())
    assert len(drawn) <= height
    assert max(map(len, drawn)) <= width
    assert "…" not in shown
    assert "running, step 7 of 1,000" in shown
    assert "8.28 min left" in shown  # 993 steps of half a second
    assert f"alert: rank {ALERTED} takes 312 ms" in shown
    lines = [line.split() for line in drawn]
    if height >= 20:
        assert ["61", "7"] in [line[:2] for line in lines]
        assert "95%" in next(line for line in lines if line[:2] == ["61", "7"])
    counted = sum(1 for line in lines if line[1:2] == ["7"])
    assert f"{64 - counted} {'more ' * bool(counted)}ranks, step 7" in shown or counted == 64


def test_a_run_that_has_not_stepped_yet_lasts_since_it_began(cli: Cli, tmp_path: Path) -> None:
    row = {"event": "attempt", "attempt": 0, "time": time.time() - 900, "ranks": 2}
    (tmp_path / "run.jsonl").write_text(json.dumps(row) + "\n")
    with RunLock(tmp_path):
        shown, document = cli(f"watch '{tmp_path}'").out, cli(f"watch '{tmp_path}' --json").json
    assert "running, step 0, 15" in shown
    assert "min so far" in shown
    assert document["seconds"] == pytest.approx(900, abs=30)
    assert [rank["step"] for rank in document["ranks"]] == [None, None]


def test_the_last_rows_of_a_long_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecentRows, "MOST", 20)
    monkeypatch.setattr(RecentRows, "ROW_BYTES", 40)
    paths = [tmp_path / f"metrics-rank{rank}.jsonl" for rank in range(2)]

    def add(path: Path, *rows: dict[str, object]) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    attempt: dict[str, object] = {"event": "attempt", "attempt": 3}
    steps: list[dict[str, object]] = [{"event": "step", "step": step} for step in range(30)]
    add(paths[0], {"event": "attempt", "attempt": 2}, attempt, *steps)
    add(paths[1], attempt, *steps[:4])
    recent = RecentRows(tmp_path)
    assert recent.read() == [[attempt, *steps[-10:]], [attempt, *steps[:4]]]
    add(paths[0], {"event": "step", "step": 30})
    with paths[0].open("a") as file:
        file.write('{"event": "st')  # the writer is not done
    assert recent.read()[0] == [attempt, *steps[-9:], {"event": "step", "step": 30}]
    with paths[0].open("a") as file:
        file.write('ep", "step": 31}\n')
    assert recent.read()[0] == [attempt, *steps[-8:], *({"event": "step", "step": step} for step in (30, 31))]
    paths[0].write_text(json.dumps(steps[0]) + "\n")  # a run of its own
    assert recent.read()[0] == [steps[0]]


class Terminal(io.StringIO):
    """A terminal, with what is printed to it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_page_that_is_ended_leaves_the_terminal_whole(
    wide_run: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    from dsplan.render.live_frames import follow

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    watch, looks, while_stopped = RunWatch(wide_run), 0, list[str]()
    monkeypatch.setattr("dsplan.render.live_frames.stop_process", lambda: while_stopped.append(shown.getvalue()))

    def look() -> Frame:
        nonlocal looks
        looks += 1
        if looks == 2:
            os.kill(os.getpid(), signal.SIGTSTP)
        if looks == 3:
            os.kill(os.getpid(), ending)
        return watch.look()

    with RunLock(wide_run), pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        follow(look, 0.01)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 128 + signal.SIGTERM
    _, left, after = shown.getvalue().rpartition("\x1b[?1049l")
    assert left
    assert "\x1b[?25h" in shown.getvalue()
    assert "\x1b[?25l" not in after
    assert "running, step 7" in after
    assert after.count("forward") == 64
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGTSTP)] == [signal.SIG_DFL, signal.SIG_DFL]
    (before,) = while_stopped
    assert before.endswith("\x1b[?25h\x1b[?1049l")
    assert "\x1b[?1049h" in shown.getvalue()[len(before) :]  # drawn on after it


def test_a_terminal_that_cannot_draw_over_itself_gets_a_page_as_wide_as_it_is(
    wide_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    with RunLock(wide_run):
        assert main(["watch", str(wide_run)]) == 0
    lines = shown.getvalue().splitlines()
    assert "\x1b" not in shown.getvalue()
    assert max(map(len, lines)) <= 50
    assert sum(line.startswith("─" * 20) for line in lines) == 2


@pytest.mark.parametrize(("term", "encoding"), [("xterm", "utf-8"), ("xterm", "ascii"), ("dumb", "utf-8")])
def test_the_live_line_of_a_run_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, term: str, encoding: str) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", term)
    shown = Terminal()
    monkeypatch.setattr(Terminal, "encoding", encoding)
    with RunView(ranks=8, out=shown) as view:
        for step in range(1, 41):
            loss = 9 - step / 9
            view.show(
                StepDone(step=step, loss=loss, seconds=0.74, samples=8, tokens=65536, peak_bytes=3 << 30, rss_bytes=0)
            )
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", shown.getvalue()).replace("\r", "\n").split("\n")
    if term == "dumb":  # a line now and then
        assert [line for line in drawn if line] == ["step 1  loss 8.8889  740 ms/step  708K tokens/s  peak 3.0 GiB"]
        return
    assert "step 40  loss 4.5556  740 ms/step" in drawn
    assert max(map(len, drawn)) <= 40
    curves = [line for line in drawn if line.startswith("loss ")][-1]
    assert curves == (
        "loss █▇▇▆▅▅▄▄▃▂▂▁  speed ▄▄▄▄▄▄▄▄▄▄▄▄" if encoding == "utf-8" else "loss ##**==--..__  speed ------------"
    )


def test_a_terminal_obeys_no_name() -> None:
    from rich.console import Console

    name = "\x1b]0;owned\x07\x1b[31m<script>[bold]" + "x" * 2 * MOST_LETTERS
    table = ShownTable(columns=columns("model", "what"), rows=[[name, "a"]], title=name)
    console = Console(record=True, width=200, markup=False, file=io.StringIO())
    for drawn in renderables([Text(text=name), table], console):
        console.print(drawn)
    for text in (plain_text([Text(text=name), table]), console.export_text()):
        assert "<script>[bold]" in text
        assert not set(text) & {"\x1b", "\x07"}
        assert len(text) < 10 * MOST_LETTERS
    assert printable("two\nlines") == "two\nlines"


@pytest.mark.parametrize(("tokens", "rate"), [(0, "200 samples/s"), (100, "200 samples/s"), (6400, "12.8K tokens/s")])
def test_the_line_of_a_step_counts_samples_where_there_are_no_tokens(tokens: int, rate: str) -> None:
    step = StepDone(step=3, loss=None, seconds=1.0, samples=100, tokens=tokens, peak_bytes=0, rss_bytes=0)
    assert step_line(step, ranks=2) == f"step 3  1 s/step  {rate}"
