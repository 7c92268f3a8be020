"""A run in an object store is one command's at a time: who holds it, under a number that only goes up. No torch.

Beside its checkpoints, `runs/ID/` has an object for every command that has held the run: `00000001.json`, a `Holder`,
which that command alone writes again, every 20 seconds, while it is at work. The next one takes the next number,
by making an object that must not be there yet, of which a store lets one succeed. So there are no two of a number; and
a command that sees a higher number than its own has lost the run and ends.

A holder is gone when it says that it is over, when its process of this machine is, or when the store has heard nothing
of it for a minute, by the store's own clock. A command that cannot reach the store for longer trains on, and ends when
it sees that another has the run: until then both may write checkpoints, which no store prevents.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.files import read_text
from hardware_db.from_json import WrongValue, from_json
from hardware_db.notices import notice
from strategies.checkpoint.object_store import ObjectPath, create, look_at, names_in, put, read_small, store_of
from strategies.run_directory.files import HOLD_FILE, read_json, write_json

RUNS = "runs"
"""The folder beside a run's checkpoints."""
RENEWAL_SECONDS = 20.0
"""Between two words of a holder, each of which is three requests: a listing, a read and a write."""
LOST_SECONDS = 60.0
"""Without a word of it, after which a holder counts as gone."""
_LOOK_SECONDS = 2.0
_MOST_HOLDER_BYTES = 2**16
_PATIENCE = (0.5, 1.0)
"""Pauses, in seconds, of a renewal that fails: the next one is due soon."""
_NAME = re.compile(r"(\d{8})\.json")


class HeldElsewhere(DsplanError):
    """A run that another command is at work on, or has been since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The command that holds a run, or has held it."""

    id: str
    """Of the command; no two have one."""
    host: str
    process: int
    began: float
    """When the process began, in seconds since 1970."""
    machine: str = ""
    """That of the process, of which `host` may be the name of several; empty: not known."""
    script: str = ""
    """The name of the script, for people."""
    renewals: int = 0
    is_over: bool = False
    """Whether the command has ended, and said so."""
    outcome: str = ""
    """How the run ended, as its journal says it; empty: it did not."""

    @classmethod
    def of_this_process(cls, script: str) -> Holder:
        """Return this command as a holder."""
        import psutil  # 10 ms, for stores alone

        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            process=os.getpid(),
            began=psutil.Process().create_time(),
            machine=_machine(),
            script=script,
        )

    @property
    def is_here(self) -> bool:
        """True if its process is, or was, of this machine."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """True if it is certain that this command is at work no more: it said so, or its process here has ended."""
        if self.is_over or not self.is_here:
            return self.is_over
        import psutil

        with suppress(psutil.Error):
            process = psutil.Process(self.process)
            is_another = abs(process.create_time() - self.began) > 1
            return is_another or process.status() == psutil.STATUS_ZOMBIE
        return True

    def to_bytes(self) -> bytes:
        """Return the object of a store."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    """The newest holder of a run, and its number."""

    folder: ObjectPath
    number: int
    holder: Holder

    @property
    def path(self) -> ObjectPath:
        """The object that it writes."""
        return self.folder / f"{self.number:08d}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldFile:
    """`store.json` of a run directory: the last number under which its run was held, or fetched, here."""

    address: str
    number: int

    def save(self, directory: Path) -> None:
        """Replace the file."""
        write_json(directory / HOLD_FILE, asdict(self))

    @classmethod
    def load(cls, directory: Path) -> HoldFile | None:
        """Read the file; None where the run was never in a store."""
        path = directory / HOLD_FILE
        return read_json(cls, path) if path.exists() else None


def newest_holder(folder: ObjectPath) -> Numbered | None:
    """Return who holds a run, or was the last to; None where nobody ever did.

    Raises:
        Unreachable: the store refuses, or does not answer.
        BrokenFile: what it holds is of another version.
    """
    numbers = (int(match[1]) for name in names_in(folder) if (match := _NAME.fullmatch(name)))
    for number in sorted(numbers, reverse=True):
        path = folder / f"{number:08d}.json"
        data = read_small(path, _MOST_HOLDER_BYTES)
        if data is None:
            continue  # removed by its successor just now
        try:
            return Numbered(folder=folder, number=number, holder=from_json(Holder, json.loads(data)))
        except (ValueError, RecursionError, WrongValue):
            raise BrokenFile(path, "is not of this version of dsplan", "use the one that began the run") from None
    return None


def wait_until_free(held: Numbered) -> None:
    """Return when a holder is gone, at once or after at most a minute without a word of it.

    Raises:
        HeldElsewhere: it is at work.
        Unreachable: the store refuses, or does not answer.
    """
    if held.holder.is_gone:
        return
    if held.holder.is_here:
        raise _at_work(held)
    left = LOST_SECONDS - _silence_seconds(held)
    if left > 0:
        ago = f"was at work on this run {LOST_SECONDS - left:.0f} s ago"
        notice(f"{held.folder}: {held.holder.host} {ago}: waiting for another word of it, {left:.0f} s at most")
    until = time.monotonic() + left
    while time.monotonic() < until:
        time.sleep(min(_LOOK_SECONDS, LOST_SECONDS / 10))
        now = newest_holder(held.folder)
        if now is None or now.holder.is_over:
            return
        if now != held:
            raise _at_work(now)


def _at_work(held: Numbered) -> HeldElsewhere:
    where = f"{held.holder.host} (process {held.holder.process})"
    return HeldElsewhere(f"{held.folder}: dsplan run on {where} is at work on this run; stop it there first")


def _silence_seconds(held: Numbered) -> float:
    """Return for how long a holder has said nothing, by the clock of the store, which dates what is written now."""
    probe = held.folder / f".look-{uuid.uuid4().hex}"
    put(probe, lambda: store_of(probe).pipe_file(str(probe), b"."))
    moments = [look_at(path) for path in (probe, held.path)]
    probe.unlink()
    now, then = (0.0 if moment is None else float(moment["modified"]) for moment in moments)
    return max(0.0, now - then)


def _machine() -> str:
    """Return what tells this machine, and this container on it, from others; empty where it cannot be told."""
    boot = read_text(Path("/proc/sys/kernel/random/boot_id"))
    with suppress(OSError):
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{socket.gethostname()}" if boot else ""
    return ""


@dataclass(kw_only=True, slots=True)
class Hold:
    """The hold of this command on a run: renewed while it works, released at its end."""

    mine: Numbered
    lost_to: str = ""
    """The host whose command has the run now; empty: this one has it."""
    _renewed: float = field(default_factory=time.monotonic)

    @classmethod
    def take(cls, folder: ObjectPath, directory: Path, script: str) -> Hold:
        """Take a run for the command that supervises it in a run directory, which notes the number.

        Raises:
            HeldElsewhere: another command is at work on it, or was since this directory's was.
            Unreachable: the store refuses, or does not answer.
        """
        last, noted = newest_holder(folder), HoldFile.load(directory)
        if last is not None:
            if noted is not None and noted.address == str(folder) and noted.number < last.number:
                raise HeldElsewhere(
                    f"{directory}: the run was resumed on {last.holder.host} since; go on from there: dsplan run"
                    f" --resume {folder}"
                )
            wait_until_free(last)
        number = last.number + 1 if last else 1
        mine = Numbered(folder=folder, number=number, holder=Holder.of_this_process(script))
        if not create(mine.path, mine.holder.to_bytes()):
            raise _at_work(newest_holder(folder) or mine)
        HoldFile(address=str(folder), number=number).save(directory)
        return cls(mine=mine)

    @property
    def is_due(self) -> bool:
        """True if the store is to hear of this command again."""
        return time.monotonic() - self._renewed >= RENEWAL_SECONDS

    def renew(self) -> None:
        """Say to the store that this command is at work, or see that another one has the run.

        Raises:
            Unreachable: the store refuses, or does not answer.
        """
        self._renewed = time.monotonic()
        if self._is_mine():
            self._write(replace(self.mine.holder, renewals=self.mine.holder.renewals + 1))

    def release(self, outcome: str) -> None:
        """Say to the store that this command has ended, so that the next one need not wait.

        Raises:
            Unreachable: the store refuses, or does not answer.
        """
        if self._is_mine():
            self._write(replace(self.mine.holder, is_over=True, outcome=outcome))

    def _is_mine(self) -> bool:
        last = newest_holder(self.mine.folder)
        # A store without conditional writes may have let two take one number: the last to write has it.
        if last is not None and (last.number > self.mine.number or last.holder.id != self.mine.holder.id):
            self.lost_to = last.holder.host
        return not self.lost_to

    def _write(self, holder: Holder) -> None:
        self.mine = replace(self.mine, holder=holder)
        path = self.mine.path
        put(path, lambda: store_of(path).pipe_file(str(path), holder.to_bytes()), _PATIENCE)


def runs_at(address: ObjectPath) -> list[Numbered]:
    """Return the runs whose checkpoints go to an address, or the one that it is of, each with its last holder.

    Raises:
        Unreachable: the store refuses, or does not answer.
    """
    runs = address / RUNS
    folders = [address] if address.parent.name == RUNS else [runs / name for name in names_in(runs)]
    return [held for folder in folders if (held := newest_holder(folder)) is not None]
