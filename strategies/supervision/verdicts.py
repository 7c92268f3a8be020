"""For whom the ranks of a hung run wait: verdicts over their heartbeats, and which of several to believe. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hardware_db.units import format_seconds
from strategies.run_directory.heartbeat import Meeting


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The state of a rank, which its watchdog publishes about once a second."""

    rank: int
    pid: int
    host: str
    number: int
    """Changes with every heartbeat, and only grows."""
    step: int
    calls: int
    """Counts what all ranks do alike."""
    section: str
    """What the rank is in; empty between the engine's calls."""
    has_engine: bool = True
    """Whether an engine says what the rank is in."""
    quiet_seconds: float
    """How long nothing has happened."""
    time: float
    meetings: tuple[Meeting, ...] = ()
    """The last calls that gather sharded tensors from all ranks."""
    inside: bool = False
    """Whether the last of the meetings has not ended."""
    waits_at: str = ""
    """The script's line where it waits for others in another collective."""
    has_ended: bool = False
    """Whether the script is over."""

    def text(self) -> str:
        """Return what `read_heartbeat` reads."""
        return json.dumps(asdict(self))


def read_heartbeat(text: str | None) -> Heartbeat | None:
    """Read a heartbeat that `Heartbeat.text` wrote; None for anything else."""
    try:
        raw = json.loads(text or "")
        return Heartbeat(**{**raw, "meetings": tuple(Meeting(**each) for each in raw.pop("meetings", ()))})
    except (ValueError, TypeError):
        return None


def read_heartbeat_file(path: Path) -> Heartbeat | None:
    """Read the last heartbeat that a rank has left in its run directory; None where there is none."""
    try:
        return read_heartbeat(path.read_text())
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The ranks for which the others wait, and one line that says so."""

    behind: tuple[int, ...]
    sentence: str
    silent: Mapping[int, int] = field(default_factory=dict)
    """Ranks that say nothing any more, with the number of the last heartbeat of each; 0: there was none."""
    is_final: bool = False
    """Whether the script's own calls differ between ranks, which no repetition mends."""

    def text(self) -> str:
        """Return what `read_verdict` reads."""
        return json.dumps(asdict(self))


def read_verdict(text: str | None) -> Verdict | None:
    """Read a verdict that `Verdict.text` wrote, or None if there is none."""
    if text is None:
        return None
    raw = json.loads(text)
    return Verdict(**{**raw, "behind": tuple(raw["behind"]), "silent": ranks_by_number(raw["silent"])})


def ranks_by_number(silent: Mapping[str, int]) -> dict[int, int]:
    """Restore the ranks of `Verdict.silent`, which JSON has as text."""
    return {int(rank): number for rank, number in silent.items()}


Heartbeats = Mapping[int, Heartbeat | None]
"""The last heartbeat of every rank; None for one that has published none."""


def judge(before: Heartbeats, now: Heartbeats, *, quiet_seconds: float) -> Verdict | None:
    """Judge ranks of which the first looked at has been quiet for `quiet_seconds`.

    `before` and `now` are a few heartbeats apart. None if some rank still works, for which the others may be waiting
    rightly.
    """
    if silent := silent_ranks(before, now):
        return _blame_silent(silent, now)
    beats = _published(now)
    if any(beat.quiet_seconds < quiet_seconds / 2 for beat in beats.values()):
        return None
    return slowest(beats, quiet_seconds)


def silent_ranks(before: Heartbeats, now: Heartbeats) -> list[int]:
    """List the ranks whose heartbeats did not go on between two looks."""
    return sorted(rank for rank, beat in now.items() if beat is None or beat == before.get(rank))


def slowest(now: Heartbeats, quiet_seconds: float) -> Verdict:
    """Name the ranks that have made the fewest calls: those for which the others wait, though they may still work."""
    beats = _published(now)
    fewest = min(beat.calls for beat in beats.values())
    behind = sorted(rank for rank, beat in beats.items() if beat.calls == fewest)
    outside = [rank for rank in behind if not beats[rank].section]
    if len(behind) == len(beats) and outside:
        behind = outside
    first = beats[behind[0]]
    outside_sections = "outside the engine" if first.has_engine else "in the script's own code"
    where = f"in {first.section!r}" if first.section else outside_sections
    quiet = f"no progress for {format_seconds(quiet_seconds)} in step {first.step + 1}"
    if len(behind) == len(beats):
        sentence = f"{quiet}: all ranks stand {where}"
    else:
        sentence = f"{quiet}: {_named(behind)} {_does(behind, 'is', 'are')} {where} and the others wait"
    return Verdict(behind=tuple(behind), sentence=sentence)


def _published(now: Heartbeats) -> dict[int, Heartbeat]:
    return {rank: beat for rank, beat in now.items() if beat is not None}


def _blame_silent(silent: list[int], now: Heartbeats) -> Verdict:
    last = now[silent[0]]
    where = "" if last is None else f" (process {last.pid} on {last.host})"
    others = "" if len(silent) == len(now) else "; the others wait"
    sentence = (
        f"{_named(silent)} {_does(silent, 'does', 'do')} not answer: stopped, or stuck in native code{where}{others}"
    )
    numbers = {rank: 0 if (beat := now[rank]) is None else beat.number for rank in silent}
    return Verdict(behind=tuple(silent), sentence=sentence, silent=numbers)


# Verdicts that differ: who has spoken since is neither stopped nor stuck, and may only have been starved.


def weigh(verdicts: Mapping[int, Verdict], now: Heartbeats) -> dict[int, Verdict]:
    """Keep the verdicts to believe, by the rank that reported: all, where each of them is contradicted.

    A verdict that calls a rank silent is contradicted where that one's heartbeats went on, or where it has reported a
    verdict of its own that does not say the same.
    """
    beats = _published(now)

    def is_heard(rank: int, number: int) -> bool:
        has_reported = rank in verdicts and rank not in verdicts[rank].silent
        return has_reported or (rank in beats and beats[rank].number > number)

    believed = {}
    for reporter, verdict in verdicts.items():
        heard = {rank for rank, number in verdict.silent.items() if is_heard(rank, number)}
        if behind := tuple(rank for rank in verdict.behind if rank not in heard):
            believed[reporter] = replace(verdict, behind=behind)
    return believed or dict(verdicts)


def answer(verdict: Verdict, rank: int, now: Heartbeats, quiet_seconds: float) -> Verdict:
    """Return what a rank makes of another one's verdict: that this rank is silent, it knows to be wrong."""
    if rank not in verdict.silent:
        return verdict
    beats = _published(now)
    silent = [
        other
        for other, number in verdict.silent.items()
        if other != rank and (other not in beats or beats[other].number <= number)
    ]
    return _blame_silent(silent, now) if silent else slowest(now, quiet_seconds)


# Ranks that have parted: some are in a call that gathers sharded tensors from all, and others will never be.


def parted(now: Heartbeats, quiet_seconds: float) -> Verdict | None:
    """Judge ranks whose scripts call differently what all must call alike; None where that is not certain.

    It is certain where the same call, by number, is of another kind on another rank. It is as well where a rank waits
    in a call that others have not begun, and each of these has ended or waits for the others in a collective of its
    own; all have been quiet for `quiet_seconds` then. A rank that works, loads data, or sleeps may yet come.
    """
    beats = _published(now)
    if len(beats) < len(now):
        return None
    return _judge_unlike_calls(beats) or _judge_lone_call(beats, quiet_seconds)


def _judge_unlike_calls(beats: Mapping[int, Heartbeat]) -> Verdict | None:
    if not all(beat.meetings for beat in beats.values()):
        return None
    begins = max(beat.meetings[0].number for beat in beats.values())
    ends = min(beat.meetings[-1].last for beat in beats.values())
    starts = {begins, *(each.number for beat in beats.values() for each in beat.meetings)}
    called = {
        number: {rank: _meeting_at(number, beat.meetings) for rank, beat in beats.items()}
        for number in sorted(starts)
        if begins <= number <= ends
    }
    clash = next((own for own in called.values() if len({_family(each) for each in own.values()}) > 1), None)
    if clash is None:
        return None
    # They parted where one of them evaluated and the others trained, if that is still known.
    first = next(own for own in called.values() if len({each.kind for each in own.values()}) > 1)
    odd = _odd({rank: each.kind for rank, each in first.items()})
    others = sorted(set(beats) - set(odd))
    there = f"{_named(others)} {_does(others, 'is', 'are')} in {_called(first[others[0]])}"
    return _blame_lone_call(odd, first[odd[0]], there)


def _meeting_at(number: int, meetings: Sequence[Meeting]) -> Meeting:
    return next(each for each in meetings if each.number <= number <= each.last)


def _judge_lone_call(beats: Mapping[int, Heartbeat], quiet_seconds: float) -> Verdict | None:
    last = {rank: beat.meetings[-1].last if beat.meetings else 0 for rank, beat in beats.items()}
    # A call that met another collective of the same size has come back, and its rank waits in the next one.
    stuck = {rank for rank, beat in beats.items() if beat.inside or beat.waits_at}
    ahead = sorted(rank for rank in stuck if last[rank] == max(last.values()))
    others = sorted(set(beats) - set(ahead))
    if not ahead or not others or any(beats[rank].quiet_seconds < quiet_seconds for rank in ahead):
        return None
    for rank in others:
        beat = beats[rank]
        waits = bool(beat.waits_at) and not beat.inside and beat.quiet_seconds >= quiet_seconds
        if last[rank] >= last[ahead[0]] or not (beat.has_ended or waits):
            return None
    waiting = [rank for rank in others if not beats[rank].has_ended] or others
    if beats[waiting[0]].has_ended:
        there = f"{_named(waiting)} {_does(waiting, 'has', 'have')} ended"
    else:
        there = f"{_named(waiting)} {_does(waiting, 'waits', 'wait')} at {beats[waiting[0]].waits_at}"
    return _blame_lone_call(ahead, beats[ahead[0]].meetings[-1], there)


def _blame_lone_call(ranks: list[int], meeting: Meeting, there: str) -> Verdict:
    call = {"evaluation": "the model without gradients", "forward": "the model"}.get(meeting.kind, meeting.kind)
    sentence = (
        f"{meeting.place or 'the script'}: {_named(ranks)} {_does(ranks, 'calls', 'call')} {call} alone,"
        f" which gathers sharded tensors from all ranks, and {there}; call it on every rank"
    )
    return Verdict(behind=tuple(ranks), sentence=sentence, is_final=True)


def _family(meeting: Meeting) -> str:
    return "forward" if meeting.kind == "evaluation" else meeting.kind


def _odd(kinds: Mapping[int, str]) -> list[int]:
    """Pick the ranks that do what fewest do; of equally many, those that do not train."""
    counts = Counter(kinds.values())
    rarest = min(counts, key=lambda kind: (counts[kind], kind in ("forward", "backward", "step"), kind))
    return sorted(rank for rank, kind in kinds.items() if kind == rarest)


def _called(meeting: Meeting) -> str:
    return f"{meeting.kind!r}" + (f" at {meeting.place}" if meeting.place else "")


def _named(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _does(ranks: list[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
