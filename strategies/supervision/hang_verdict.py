"""For whom a hung run waits, told from what its ranks last said. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hardware_db.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a rank's watchdog says of it about once a second.

    `calls` counts what all ranks do alike; `section` is what the rank is in, empty between the engine's calls;
    `quiet_seconds` is how long nothing has happened. `number` changes with every heartbeat.
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

    def text(self) -> str:
        return json.dumps(asdict(self))


def read_heartbeat(text: str | None) -> Heartbeat | None:
    """A heartbeat that `Heartbeat.text` wrote; None for anything else."""
    try:
        return Heartbeat(**json.loads(text or ""))
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which ranks the others wait for, and one line that says so; `silent` are those that say nothing any more."""

    behind: tuple[int, ...]
    sentence: str
    silent: tuple[int, ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))


def read_verdict(text: str | None) -> Verdict | None:
    """Read a verdict that `Verdict.text` wrote, or None if there is none."""
    if text is None:
        return None
    found = json.loads(text)
    return Verdict(behind=tuple(found["behind"]), sentence=found["sentence"], silent=tuple(found["silent"]))


def judge(
    before: Mapping[int, Heartbeat | None], now: Mapping[int, Heartbeat | None], *, quiet_seconds: float
) -> Verdict | None:
    """The verdict over ranks of which the first looked at has been quiet for `quiet_seconds`.

    `before` and `now` are the ranks' heartbeats at two moments that are a few heartbeats apart. None if some rank still
    works, for which the others may be waiting rightly.
    """
    silent = sorted(rank for rank, beat in now.items() if beat is None or beat == before.get(rank))
    if silent:
        return Verdict(behind=tuple(silent), sentence=_silent(silent, now), silent=tuple(silent))
    beats = {rank: beat for rank, beat in now.items() if beat is not None}
    if any(beat.quiet_seconds < quiet_seconds / 2 for beat in beats.values()):
        return None
    return _slowest(beats, quiet_seconds)


def slowest(now: Mapping[int, Heartbeat | None], quiet_seconds: float) -> Verdict:
    """The verdict where the ranks for which the others wait work, but for far too long."""
    return _slowest({rank: beat for rank, beat in now.items() if beat is not None}, quiet_seconds)


def _silent(silent: list[int], now: Mapping[int, Heartbeat | None]) -> str:
    last = now[silent[0]]
    where = "" if last is None else f" (process {last.pid} on {last.host})"
    others = "" if len(silent) == len(now) else "; the others wait"
    return f"{_named(silent)} {_does(silent, 'does', 'do')} not answer: stopped, or stuck in native code{where}{others}"


def _slowest(beats: Mapping[int, Heartbeat], quiet_seconds: float) -> Verdict:
    fewest = min(beat.calls for beat in beats.values())
    behind = sorted(rank for rank, beat in beats.items() if beat.calls == fewest)
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


def _named(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _does(ranks: list[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
