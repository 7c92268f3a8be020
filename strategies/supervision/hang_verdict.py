"""For whom a hung run waits, told from what its ranks last said. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hardware_db.units import format_seconds
from strategies.run_directory.heartbeat import Meeting


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a rank's watchdog says of it about once a second.

    `calls` counts what all ranks do alike; `section` is what the rank is in, empty between the engine's calls;
    `quiet_seconds` is how long nothing has happened. `number` changes with every heartbeat. `meetings` are the last
    calls that gather sharded tensors from all ranks, of which it is `inside` the last one; `waits_at` is the script's
    line where it waits for others in another collective, and `has_ended` says that its script is over.
    """

    rank: int
    pid: int
    host: str
    number: int
    step: int
    calls: int
    section: str
    quiet_seconds: float
    time: float
    meetings: tuple[Meeting, ...] = ()
    inside: bool = False
    waits_at: str = ""
    has_ended: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


def read_heartbeat(text: str | None) -> Heartbeat | None:
    """A heartbeat that `Heartbeat.text` wrote; None for anything else."""
    try:
        raw = json.loads(text or "")
        return Heartbeat(**{**raw, "meetings": tuple(Meeting(**each) for each in raw.pop("meetings", ()))})
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which ranks the others wait for, and one line that says so; `silent` are those that say nothing any more."""

    behind: tuple[int, ...]
    sentence: str
    silent: tuple[int, ...] = ()
    is_final: bool = False
    """Whether the script's own calls differ between ranks, which no repetition mends."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def read_verdict(text: str | None) -> Verdict | None:
    """A verdict that `Verdict.text` wrote; None where there is none."""
    if text is None:
        return None
    found = json.loads(text)
    return Verdict(
        behind=tuple(found["behind"]),
        sentence=found["sentence"],
        silent=tuple(found["silent"]),
        is_final=found["is_final"],
    )


def judge(
    before: Mapping[int, Heartbeat | None], now: Mapping[int, Heartbeat | None], *, quiet_seconds: float
) -> Verdict | None:
    """The verdict over ranks of which the first looked at has been quiet for `quiet_seconds`.

    `before` and `now` are the ranks' heartbeats at two moments that are a few heartbeats apart. None where some rank
    still works, for which the others may be waiting rightly.
    """
    silent = sorted(rank for rank, one in now.items() if one is None or one == before.get(rank))
    if silent:
        return Verdict(behind=tuple(silent), sentence=_silent(silent, now), silent=tuple(silent))
    beats = {rank: one for rank, one in now.items() if one is not None}
    if any(one.quiet_seconds < quiet_seconds / 2 for one in beats.values()):
        return None
    return _slowest(beats, quiet_seconds)


def slowest(now: Mapping[int, Heartbeat | None], quiet_seconds: float) -> Verdict:
    """The verdict where the ranks for which the others wait work, but for far too long."""
    return _slowest({rank: one for rank, one in now.items() if one is not None}, quiet_seconds)


def _silent(silent: list[int], now: Mapping[int, Heartbeat | None]) -> str:
    last = now[silent[0]]
    where = "" if last is None else f" (process {last.pid} on {last.host})"
    others = "" if len(silent) == len(now) else "; the others wait"
    return f"{_named(silent)} {_does(silent, 'does', 'do')} not answer: stopped, or stuck in native code{where}{others}"


def _slowest(beats: Mapping[int, Heartbeat], quiet_seconds: float) -> Verdict:
    fewest = min(one.calls for one in beats.values())
    behind = sorted(rank for rank, one in beats.items() if one.calls == fewest)
    outside = [rank for rank in behind if not beats[rank].section]
    if len(behind) == len(beats) and outside:
        behind = outside
    first = beats[behind[0]]
    where = f"in {first.section!r}" if first.section else "outside the engine"
    quiet = f"no progress for {format_seconds(quiet_seconds)} in step {first.step + 1}"
    if len(behind) == len(beats):
        sentence = f"{quiet}: all ranks stand {where}"
    else:
        sentence = f"{quiet}: {_named(behind)} {_does(behind, 'is', 'are')} {where} and the others wait"
    return Verdict(behind=tuple(behind), sentence=sentence)


# Ranks that have parted: some are in a call that gathers sharded tensors from all, and others will never be.


def parted(now: Mapping[int, Heartbeat | None], quiet_seconds: float) -> Verdict | None:
    """The verdict over ranks whose scripts call differently what all must call alike; None where that is not certain.

    It is certain where the same call, by number, is of another kind on another rank. It is as well where a rank waits
    in a call that others have not begun, and each of these has ended or waits for the others in a collective of its
    own; all have been quiet for `quiet_seconds` then. A rank that works, loads data, or sleeps may yet come.
    """
    beats = {rank: beat for rank, beat in now.items() if beat is not None}
    if len(beats) < len(now):
        return None
    return _unlike(beats) or _alone(beats, quiet_seconds)


def _unlike(beats: Mapping[int, Heartbeat]) -> Verdict | None:
    if not all(beat.meetings for beat in beats.values()):
        return None
    begins = max(beat.meetings[0].number for beat in beats.values())
    ends = min(beat.meetings[-1].last for beat in beats.values())
    starts = {begins, *(each.number for beat in beats.values() for each in beat.meetings)}
    called = {
        number: {rank: _at(number, beat.meetings) for rank, beat in beats.items()}
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
    return _verdict(odd, first[odd[0]], there)


def _at(number: int, meetings: Sequence[Meeting]) -> Meeting:
    return next(each for each in meetings if each.number <= number <= each.last)


def _alone(beats: Mapping[int, Heartbeat], quiet_seconds: float) -> Verdict | None:
    last = {rank: beat.meetings[-1].last if beat.meetings else 0 for rank, beat in beats.items()}
    ahead = sorted(rank for rank in beats if last[rank] == max(last.values()) and beats[rank].inside)
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
    return _verdict(ahead, beats[ahead[0]].meetings[-1], there)


def _verdict(ranks: list[int], meeting: Meeting, there: str) -> Verdict:
    sentence = (
        f"{meeting.place or 'the script'}: {_named(ranks)} {_does(ranks, 'calls', 'call')} {_call_of(meeting)} alone,"
        f" which gathers sharded tensors from all ranks, and {there}; call it on every rank"
    )
    return Verdict(behind=tuple(ranks), sentence=sentence, is_final=True)


def _family(meeting: Meeting) -> str:
    return "forward" if meeting.kind == "evaluation" else meeting.kind


def _odd(kinds: Mapping[int, str]) -> list[int]:
    """The ranks that do what fewest do; of equally many, those that do not train."""
    counts = Counter(kinds.values())
    rarest = min(counts, key=lambda kind: (counts[kind], kind in ("forward", "backward", "step"), kind))
    return sorted(rank for rank, kind in kinds.items() if kind == rarest)


def _call_of(meeting: Meeting) -> str:
    return {"evaluation": "the model without gradients", "forward": "the model"}.get(meeting.kind, meeting.kind)


def _called(meeting: Meeting) -> str:
    return f"{meeting.kind!r}" + (f" at {meeting.place}" if meeting.place else "")


def _named(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _does(ranks: list[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
