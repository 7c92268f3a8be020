"""Many runs on one page: states, goodput, cost, alerts, and what a second look reads."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from dsplan.render.run_report import report_blocks
from dsplan.render.show import plain_text
from dsplan.report.run_data import read_run
from hardware_db.datasheets import find_node_type
from hardware_db.errors import BrokenFile
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.run_lock import RunLock
from strategies.launch.run_status import RunFollower, RunsFollower, steps_to_reach
from strategies.run_directory.files import CLAIM_FILE, write_json
from strategies.run_directory.spec import LaunchSpec
from tests.dsplan.cli import Cli
from tests.dsplan.run_directories import append, began, completed_run, heartbeat, journal, restarted_run, steps


def test_a_run_is_what_its_journal_and_its_steps_say(tmp_path: Path) -> None:
    restarted_run(tmp_path, now=time.time())
    with RunLock(tmp_path):
        status = RunFollower(tmp_path).look()
    assert status is not None
    assert (status.state, status.step, status.restarts) == ("resumed", 100, 1)
    assert status.held_seconds == pytest.approx(200, abs=1)
    # Steps 41 to 60 were done twice and count once; two ranks waited for the restart, too.
    assert status.productive_seconds == pytest.approx(100)
    assert status.goodput == pytest.approx(0.5, abs=0.01)
    assert status.device_seconds == pytest.approx(400, abs=2)
    assert (status.checkpoint_step, status.checkpoint_age_seconds) == (40, pytest.approx(130, abs=1))
    assert (status.tokens_per_second, status.step_seconds, status.peak_bytes) == (128, 1.0, 3 << 20)
    assert dict(status.alerts) == {"killed": 1, "loss_spike": 1}


def test_a_script_with_its_own_checkpoint_is_counted_from_each_attempts_begin(cli: Cli, tmp_path: Path) -> None:
    arguments = ("--steps", "40")
    LaunchSpec(
        script="train.py",
        arguments=arguments,
        processes=2,
        run_directory=str(tmp_path),
        supervision=DEFAULT_SUPERVISION,
    ).save()
    write_json(tmp_path / CLAIM_FILE, {"kind": "torch", "parameters": None})
    at = time.time() - 100
    append(tmp_path / "metrics-rank0.jsonl", [{"event": "attempt", "attempt": 0}, *steps(1, 14)])
    append(tmp_path / "metrics-rank0.jsonl", [{"event": "attempt", "attempt": 1}, *steps(1, 30)])
    journal(
        tmp_path,
        began(at),
        {"event": "ending", "time": at + 20, "kind": "killed", "rank": 1, "reason": "killed by signal 9"},
        {"event": "decision", "time": at + 20, "action": "restart", "why": "starts again", "delay_seconds": 0.0},
        {**began(at + 20), "attempt": 1},
        {"event": "end", "attempt": 1, "time": at + 60, "outcome": "completed", "first_step": 1, "last_step": 30},
    )
    status = RunFollower(tmp_path).look()
    assert status is not None
    assert (status.state, status.outcome, status.step, status.steps) == ("ended", "completed", 30, None)
    assert status.productive_seconds == pytest.approx(44), "nobody knows which of them were done again"
    assert "completed, step 30 from the attempt's begin, " in cli(f"watch {shlex.quote(str(tmp_path))} --once").out
    counted = partial(steps_to_reach, tmp_path, arguments)
    assert counted(attempts=1, step=12, is_completed=False) == 40
    assert counted(attempts=1, step=40, is_completed=True) == 40
    assert counted(attempts=1, step=30, is_completed=True) is None, "it began at step 10"
    write_json(tmp_path / CLAIM_FILE, {"kind": "dsplan", "parameters": None})
    assert counted(attempts=2, step=30, is_completed=True) == 40


@pytest.mark.parametrize(("quiet", "state"), [(59.0, "running"), (61.0, "stalled")])
def test_a_run_stalls_where_no_rank_gets_on(tmp_path: Path, quiet: float, state: str) -> None:
    journal(tmp_path, began(time.time() - 500))
    append(tmp_path / "metrics-rank0.jsonl", steps(1, 10))
    for rank, seconds in enumerate((quiet, quiet + 100)):
        heartbeat(tmp_path, rank, step=10, quiet_seconds=seconds)
    with RunLock(tmp_path):
        status = RunFollower(tmp_path).look()
    assert status is not None
    assert status.state == state


def test_a_run_of_another_machine_goes_on_while_its_ranks_are_heard(tmp_path: Path) -> None:
    journal(tmp_path, began(time.time() - 500))
    heartbeat(tmp_path, 0, step=0)
    follower = RunFollower(tmp_path)
    status = follower.look()
    assert status is not None
    assert status.state == "running"
    (tmp_path / "rank0.heartbeat").unlink()
    status = follower.look()
    assert status is not None
    assert (status.state, status.outcome) == ("failed", "failed")
    assert status.last_words == "dsplan run itself was ended"


def test_a_stall_in_a_step_is_no_goodput(tmp_path: Path) -> None:
    completed_run(tmp_path, at=0.0, seconds=1000.0, count=20)
    for rank in range(2):
        append(tmp_path / f"metrics-rank{rank}.jsonl", steps(21, 21, seconds=900.0))
    status = RunFollower(tmp_path).look()
    assert status is not None
    assert status.productive_seconds == pytest.approx(25)


def test_runs_are_listed_those_first_that_go_on(cli: Cli, tmp_path: Path) -> None:
    now = time.time()
    completed_run(tmp_path / "ann" / "first", at=now - 900, seconds=100.0, count=50)
    restarted_run(tmp_path / "bob" / "second", now=now)
    journal(
        tmp_path / "third",
        began(now - 300),
        {"event": "ending", "time": now - 264, "kind": "out_of_memory", "rank": 0, "reason": "CUDA out of memory"},
        {"event": "decision", "time": now - 264, "action": "give_up", "why": "", "delay_seconds": 0.0},
    )
    (tmp_path / "notes").mkdir()
    line = f"watch --runs {shlex.quote(str(tmp_path))}"
    with RunLock(tmp_path / "bob" / "second"):
        page, document = cli(f"{line} --once").out, cli(f"{line} --json --price 3.6").json
    runs = document["runs"]
    assert [run["run"] for run in runs] == ["bob/second", "third", "ann/first"]
    assert [run["state"] for run in runs] == ["resumed", "failed", "ended"]
    assert [run["outcome"] for run in runs] == [None, "out of memory", "completed"]
    assert runs[2]["goodput"] == pytest.approx(0.5)
    assert runs[2]["loss"] == 2.5
    # Ranks x seconds x $3.6 per 3,600 s.
    assert [run["usd"] for run in runs] == pytest.approx([0.4, 0.072, 0.2], abs=0.003)
    assert document["usd"] == pytest.approx(0.672, abs=0.005)
    assert "3 runs: 1 resumed, 1 ended, 1 failed; 0.187 GPU-h" in page
    assert "1 restart, killed, loss spike" in page
    assert "failed: out of memory" in page
    assert "third: CUDA out of memory" in page


def test_money_is_the_published_price_of_the_plan_s_node_type(cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "plans"
    cli(f"recommend --model gpt2 --gpus 8 --node-type p4d.24xlarge --top 1 --out {shlex.quote(str(plan))}")
    from planner.types.plan_io import load_plan

    priced: Plan = load_plan(plan / "plan-1.yaml")
    node = find_node_type("p4d.24xlarge")
    assert node.usd_per_hour is not None
    run = tmp_path / "run"
    end = {"event": "end", "time": 3600.0, "outcome": "completed", "first_step": None, "last_step": None}
    journal(run, began(0.0, ranks=8), {"event": "plan", "time": 1.0, "plan": plan_to_dict(priced)}, end)
    status = RunFollower(run).look()
    assert status is not None
    assert status.device_hours == pytest.approx(priced.configuration.world_size)
    assert status.usd() == pytest.approx(node.usd_per_hour * priced.configuration.world_size / node.gpus_per_node)


def test_a_second_look_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed_run(tmp_path / "over", at=0.0, seconds=100.0, count=50)
    journal(tmp_path / "now", began(time.time() - 30))
    append(tmp_path / "now" / "metrics-rank0.jsonl", steps(1, 10))
    follower = RunsFollower(tmp_path)
    with RunLock(tmp_path / "now"):
        assert [run.step for run in follower.look()] == [10, 50]
        read: list[str] = []
        monkeypatch.setattr("strategies.launch.run_status.parse_row", lambda line: read.append(line))
        append(tmp_path / "now" / "metrics-rank0.jsonl", steps(11, 12))
        follower.look()
    assert [f'"global_step": {step}' in line for line, step in zip(read, (11, 12), strict=True)] == [True, True]


def test_a_page_of_many_runs_fits_its_terminal(tmp_path: Path) -> None:
    from rich.console import Console

    from dsplan.render.live_frames import runs_page

    for number in range(30):
        completed_run(tmp_path / f"run{number}", at=float(number), seconds=10.0, count=3)
    runs = RunsFollower(tmp_path).look()
    for width, height in ((40, 10), (120, 40)):
        console = Console(width=width, height=height, file=io.StringIO(), legacy_windows=False, _environ={})
        console.print(runs_page(runs, console, None))
        assert isinstance(console.file, io.StringIO)
        drawn = console.file.getvalue().splitlines()
        assert len(drawn) <= height
        assert max(map(len, drawn)) <= width
        assert "30 runs: 30 ended" in drawn[0]
        assert "run29" in console.file.getvalue()
        assert ("more" in drawn[-1]) == (height < 30)


def test_links_and_what_another_version_wrote_stop_no_page(cli: Cli, tmp_path: Path) -> None:
    completed_run(tmp_path / "home" / "run", at=0.0, seconds=10.0, count=3)
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "ann").symlink_to(tmp_path / "home")
    (tmp_path / "team" / "again").symlink_to(tmp_path / "home" / "run")
    (tmp_path / "team" / "round").symlink_to(tmp_path / "team")
    journal(tmp_path / "team" / "odd", {"event": "attempt", "time": "yesterday"})
    journal(tmp_path / "team" / "a\x1b[31m", began(0.0))
    page = cli(f"watch --runs {shlex.quote(str(tmp_path / 'team'))}").out
    assert "2 runs" in page
    assert "\x1b" not in page
    shutil.rmtree(tmp_path / "home")
    assert "1 run:" in cli(f"watch --runs {shlex.quote(str(tmp_path / 'team'))}").out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("", "no run is named"),
        ("here --runs there", "here is one run and --runs names many"),
        ("--runs there --steps 5", "leave it or --runs out"),
        ("here --price 2", "--price is for the cost of many runs"),
        ("--runs there", "there: is no folder"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in cli.refuses(f"watch {flags}")


def test_many_readers_of_the_served_page_look_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsplan.ui.runs import RunsPage

    with pytest.raises(BrokenFile):
        RunsPage(tmp_path / "none")
    page = RunsPage(tmp_path)
    first = page.html()
    assert "no runs" in first
    completed_run(tmp_path / "<b>ann", at=0.0, seconds=10.0, count=3)
    assert page.html() == first
    monkeypatch.setattr("dsplan.ui.runs.REFRESH_SECONDS", 0)
    assert "&lt;b&gt;ann" in page.html()
    shutil.rmtree(tmp_path)
    assert "is gone" in page.html()


def _speeding_up(directory: Path, *, unit: str) -> None:
    """A completed run of two ranks that counts tokens or samples: 26 steps of 0.2 s, then 15 of 0.1 s."""
    completed_run(directory, at=0.0, seconds=100.0, count=0)
    figures = {"step_seconds": 0.2, "tokens_per_second": 640.0 if unit == "tokens" else None}
    measured = {"event": "measured", "measurement": {"measured": figures}, "samples_per_second": 640.0}
    journal(directory, measured)
    rows = [
        *steps(1, 26, seconds=0.2),
        *({**row, "step": row["global_step"] - 1} for row in steps(27, 41, seconds=0.1)),
    ]
    for rank in range(2):
        append(directory / f"metrics-rank{rank}.jsonl", [{**row, "tokens": 0, "samples": 64, unit: 64} for row in rows])


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_every_page_of_a_run_that_has_ended_has_the_figures_of_its_report(cli: Cli, tmp_path: Path, unit: str) -> None:
    _speeding_up(tmp_path / "run", unit=unit)
    report = plain_text(report_blocks(read_run(tmp_path / "run").report))
    assert re.search(rf"{unit}/s, all ranks +- +640 ", report)
    page, document = cli(f"watch '{tmp_path / 'run'}' --once").out, cli(f"watch '{tmp_path / 'run'}' --json").json
    assert re.search(rf"{unit}/s .* 640 \(640 to 1.28K\)", page)
    assert re.search(r"step .* 200 ms \(100 ms to 200 ms\)", page)
    assert (document["step_seconds"], document[f"{unit}_per_second"]) == (0.2, 640)
    (listed,) = cli(f"watch --runs '{tmp_path}' --json").json["runs"]
    assert (listed["step_seconds"], listed[f"{unit}_per_second"]) == (0.2, 640)
    table = cli(f"watch --runs '{tmp_path}' --once").out
    assert f"step time  {unit}/s" in table
    assert re.search(r"200 ms +640 ", table)


def test_the_rate_of_a_run_that_goes_on_is_over_its_step_time(cli: Cli, tmp_path: Path) -> None:
    journal(tmp_path / "run", began(time.time() - 60))
    for rank in range(2):
        append(tmp_path / "run" / f"metrics-rank{rank}.jsonl", [*steps(1, 30, seconds=0.2), *steps(31, 31)])
    with RunLock(tmp_path / "run"):
        document = cli(f"watch '{tmp_path / 'run'}' --json").json
        (listed,) = cli(f"watch --runs '{tmp_path}' --json").json["runs"]
    for figures in (document, listed):
        assert (figures["step_seconds"], figures["tokens_per_second"]) == (0.2, 640)


def test_runs_that_count_different_units_name_them_in_their_cells(cli: Cli, tmp_path: Path) -> None:
    _speeding_up(tmp_path / "a", unit="tokens")
    _speeding_up(tmp_path / "b", unit="samples")
    table = cli(f"watch --runs '{tmp_path}' --once").out
    assert "per second" in table
    assert "640 tokens" in table
    assert "640 samples" in table
