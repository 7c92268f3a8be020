"""A run seen from another terminal: figures, curves, and texts that a terminal must not obey."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path

import pytest

from dsplan.render.charts import sparkline
from dsplan.render.show import Table as ShownTable
from dsplan.render.show import Text, columns, plain_text, renderables
from hardware_db.notices import MOST_LETTERS, printable
from tests.dsplan.cli import Cli


def test_a_line_rises_and_falls_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▄▄"
    assert sparkline([1.0, None, math.nan, 2.0], 4) == "▁  █"
    assert sparkline([0, 5], 8, unicode=False) == "_#"
    assert sparkline([], 8) == sparkline([None], 8) == ""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What two ranks of an engine have written after four steps."""
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
    found = cli(f"watch {run} --steps 100 --json").json
    assert (found["step"], found["steps"], found["step_seconds"], found["loss"]) == (4, 100, 0.5, 1.5)
    assert found["seconds_left"] is None  # nobody runs
    assert [rank["peak_bytes"] for rank in found["ranks"]] == [3 << 20, 3 << 20]
    assert [rank["gpu_utilization_percent"] for rank in found["ranks"]] == [93, 93]
    shown = cli(f"watch {run}").out
    assert "loss      █▆▃▁ 1.5000 (1.5000 to 4.5000)" in shown
    assert "3.0 MiB" in shown
    assert "93%" in shown


def test_a_directory_without_a_run_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "is no run directory" in cli.refuses(f"watch {tmp_path}")


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
