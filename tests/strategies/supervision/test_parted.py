"""Ranks whose scripts call differently what all must call alike: who is named, and who is left in peace."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from strategies.run_directory.heartbeat import Meeting, Pulse
from strategies.supervision import hang_detection
from strategies.supervision.hang_detection import Watchdog
from strategies.supervision.stopping import FileBoard
from strategies.supervision.verdicts import Heartbeat, parted, read_heartbeat
from tests.strategies.integrations import ddp_script_bodies as bodies
from tests.strategies.launch.command import run

QUIET = 20.0
TRAINED = (Meeting(1, 1, "forward", "t.py, line 7"), Meeting(2, 2, "backward", "t.py, line 8"))
ALONE = (*TRAINED, Meeting(3, 5, "evaluation", "t.py, line 12"))
ON = (*TRAINED, Meeting(3, 3, "forward", "t.py, line 7"), Meeting(4, 4, "backward", "t.py, line 8"))


def beat(rank: int, meetings: tuple[Meeting, ...], **values: Any) -> Heartbeat:
    defaults: dict[str, Any] = {"step": 3, "calls": 9, "section": "", "quiet_seconds": QUIET, "time": 0.0}
    return Heartbeat(rank=rank, pid=1, host="n", number=1, meetings=meetings, **{**defaults, **values})


WAITS = {"waits_at": "t.py, line 20"}


@pytest.mark.parametrize(
    ("own", "other", "says"),
    [
        ({"inside": True}, WAITS, "t.py, line 12: rank 0 calls the model without gradients alone, which gathers sharded"
         " tensors from all ranks, and rank 1 waits at t.py, line 20; call it on every rank"),
        ({"inside": True}, {"has_ended": True, "quiet_seconds": 0.0}, "and rank 1 has ended;"),
        ({"inside": True}, {"waits_at": "", "quiet_seconds": 60.0}, ""),  # it sleeps, or loads data
        ({"inside": True}, {**WAITS, "quiet_seconds": 2.0}, ""),
        ({"inside": True, "quiet_seconds": 2.0}, WAITS, ""),
        ({"inside": False, "quiet_seconds": 60.0}, WAITS, ""),  # it works on what it has gathered
        ({"inside": True}, {**WAITS, "inside": True}, ""),
        (WAITS, WAITS, "t.py, line 12: rank 0 calls the model without gradients alone"),  # it met another collective
    ],
)  # fmt: skip
def test_a_rank_is_alone_in_a_call_only_if_no_other_can_come(own: Any, other: Any, says: str) -> None:
    verdict = parted({0: beat(0, ALONE, **own), 1: beat(1, TRAINED, **other)}, QUIET)
    assert (verdict is None) == (says == "")
    assert verdict is None or (says in verdict.sentence and verdict.behind == (0,) and verdict.is_final)


def test_calls_of_another_kind_are_certain_without_waiting() -> None:
    verdict = parted({0: beat(0, ALONE, quiet_seconds=0.0), 1: beat(1, ON, quiet_seconds=0.0)}, QUIET)
    assert verdict is not None
    assert verdict.sentence.startswith("t.py, line 12: rank 0 calls the model without gradients alone")
    assert "rank 1 is in 'forward' at t.py, line 7" in verdict.sentence


def test_the_same_calls_at_other_lines_are_no_parting() -> None:
    elsewhere = (*TRAINED, Meeting(3, 5, "evaluation", "u.py, line 1"))
    assert parted({0: beat(0, ALONE, inside=True), 1: beat(1, elsewhere, inside=True)}, QUIET) is None
    assert parted({0: beat(0, ALONE, inside=True), 1: None}, QUIET) is None


def test_a_heartbeat_with_meetings_survives_the_board() -> None:
    assert read_heartbeat(beat(1, ALONE, inside=True).text()) == beat(1, ALONE, inside=True)


@pytest.mark.parametrize("speaks_on", [False, True])
def test_where_a_rank_stood_that_says_nothing_any_more_counts_for_nothing(
    speaks_on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank fails in the call behind the one in which another one was heard of last: it was killed, or waits there."""
    other = beat(1, TRAINED, **WAITS)
    board, shown = FileBoard(tmp_path), itertools.count()
    monkeypatch.setattr(hang_detection, "_ASIDE_SECONDS", 0.6)
    monkeypatch.setattr(hang_detection, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(hang_detection, "PULSE", pulse := Pulse())
    pulse.meetings.extend(ALONE)
    watchdog = Watchdog(tmp_path, 0, 900.0)
    monkeypatch.setattr(watchdog, "_board", board)
    monkeypatch.setattr(watchdog, "_world_size", 2)

    def heartbeats(_: Any) -> dict[int, Heartbeat]:
        return {0: beat(0, ALONE), 1: replace(other, number=next(shown)) if speaks_on else other}

    monkeypatch.setattr(watchdog, "_heartbeats", heartbeats)
    verdict = watchdog.parted_at_once()
    assert (verdict is not None) is speaks_on
    assert verdict is None or "rank 1 waits at t.py, line 20" in verdict.sentence


def test_nested_calls_are_one_meeting_and_none_counts_where_weights_are_whole() -> None:
    pulse = Pulse()
    for _ in range(3):
        with pulse.meeting("forward"), pulse.meeting("forward"):
            pass
    with pulse.apart(), pulse.meeting("evaluation"):
        pass
    (meeting,) = pulse.meetings
    assert (meeting.number, meeting.last, meeting.kind, pulse.number) == (1, 3, "forward", 3)
    assert meeting.place.startswith("test_parted.py, line ")


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_step_after_calls_that_differed_is_refused(strategy: str, new_pool: Any) -> None:
    with new_pool(2) as pool:
        typed: RankPool = pool
        with pytest.raises(RankError, match="some rank has called the model, or what else gathers"):
            typed.run(bodies.met_more_often, strategy)


SCRIPT = """
import sys, torch, torch.distributed as dist
import dsplan
from tests.strategies.training_bodies import TinyModel, batch_of
strategy, how = sys.argv[1:]
backend = "native" if strategy == "zero3" else "torch"
settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
engine, *_ = dsplan.initialize(model=TinyModel(), strategy=strategy, backend=backend, config=settings)
for step in range(3):
    engine.backward(engine(*(part[:2] for part in batch_of(step))))
    engine.step()
if engine.is_main:
    with torch.no_grad():
        engine(*batch_of(9))
if how == "barrier":
    dist.barrier()
elif how == "on":
    engine.backward(engine(*(part[:2] for part in batch_of(step))))
    engine.step()
"""


@pytest.mark.parametrize(
    ("strategy", "how", "minutes"),
    [
        ("zero3", "on", "0.1"),
        ("zero3", "barrier", "15"),
        ("fsdp", "barrier", "15"),
        ("fsdp", "on", "0"),
        ("fsdp", "ended", "15"),
    ],
)
@pytest.mark.slow
def test_evaluation_on_rank_0_alone_ends_long_before_a_hang_counts(
    strategy: str, how: str, minutes: str, tmp_path: Path
) -> None:
    (tmp_path / "alone.py").write_text(SCRIPT)
    ended = run("--nproc", "2", "--hang-minutes", minutes, "--run-dir", "r", "alone.py", strategy, how, cwd=tmp_path)
    assert ended.status == 2, ended.err
    assert "alone.py, line 14: rank 0 calls the model without gradients alone" in ended.err
    assert "Traceback" not in ended.err.splitlines()[-1]
