"""The record of a run beside its checkpoints in an object store, by which it is resumed. No torch.

`runs/ID/NUMBER.run.gz` holds the files of the run directory that resuming reads (the launch, the options, plan,
tuning, journal and list of checkpoints), as they were together. The command that holds the run (`run_hold.py`)
replaces it when one of them has changed, in one request; `fetched` makes a run directory of it elsewhere.

Secrets stay out of it (`secret_values.py`): the next command needs them from its own environment.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.from_json import WrongValue, from_json
from hardware_db.notices import notice
from strategies.checkpoint.object_store import ObjectPath, location, put, read_small, store_of
from strategies.launch.grace_period import StopRequests
from strategies.launch.run_hold import RUNS, HeldElsewhere, Hold, HoldFile, Numbered, runs_at, wait_until_free
from strategies.launch.secret_values import with_secrets, without_secrets, without_values
from strategies.run_directory.files import (
    ATTEMPT_OPTIONS_FILE,
    CLAIM_FILE,
    GIVEN_PLAN_FILE,
    HOLD_FILE,
    JOURNAL_FILE,
    LINEAGE_FILE,
    PLAN_FILE,
    SPEC_FILE,
    TUNING_FILE,
)
from strategies.run_directory.journal import read_journal
from strategies.run_directory.request import PlanRequest
from strategies.run_directory.spec import LaunchSpec

_FILES = (ATTEMPT_OPTIONS_FILE, PLAN_FILE, TUNING_FILE, CLAIM_FILE, JOURNAL_FILE, LINEAGE_FILE)
"""What `--resume` reads of a run directory, beside the launch itself."""
_VERSION = 1
_MOST_BYTES = 2**26
"""Of a record as text; a month of checkpoints every ten minutes is 3 MB."""
_LOOK_SECONDS = 1.0
"""Between two looks whether a file has changed."""
_LEAST_SECONDS = 2.0
"""Between two writes of a record."""
_PATIENCE = (0.5, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The content of a record."""

    version: int = _VERSION
    script_digest: str = ""
    """Of the script's bytes, by SHA-256."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The texts of the run directory's files, by name."""

    @classmethod
    def of(cls, spec: LaunchSpec) -> RunRecord:
        """Return what a run directory holds now, without secrets."""
        texts = {name: _text(spec.directory / name) for name in _FILES}
        plan_file = PlanRequest.of(spec.environment).plan_file
        texts[GIVEN_PLAN_FILE] = _text(Path(plan_file)) if plan_file else None
        texts[SPEC_FILE] = json.dumps(asdict(without_secrets(spec)))
        files = {name: without_values(text) for name, text in texts.items() if text is not None}
        return cls(script_digest=_digest(Path(spec.script)), files=files)

    def to_bytes(self) -> bytes:
        """Return the object of a store; the same for what is the same."""
        return gzip.compress(json.dumps(asdict(self), sort_keys=True).encode(), mtime=0)

    @classmethod
    def read(cls, held: Numbered) -> RunRecord:
        """Read the newest record of a run.

        Raises:
            BrokenFile: there is none yet, or it is damaged or of another version.
        """
        for number in range(held.number, 0, -1):
            path = _path(held.folder, number)
            if (data := read_small(path, _MOST_BYTES)) is None:
                continue  # its command ended before it wrote one
            try:
                with gzip.open(io.BytesIO(data)) as file:
                    text = file.read(_MOST_BYTES + 1)
                record = from_json(cls, json.loads(text[:_MOST_BYTES]))
            except (OSError, EOFError, zlib.error, ValueError, RecursionError, WrongValue):
                record = cls(version=0)
            if record.version != _VERSION or SPEC_FILE not in record.files:
                raise BrokenFile(path, "is damaged, or not of this version of dsplan", "use the one that began the run")
            return record
        raise BrokenFile(held.folder, "the run ended before it had anything to resume", "start it again")


def record_folder(spec: LaunchSpec) -> ObjectPath | None:
    """Return where the record of a run goes: beside its checkpoints, where these are in a store.

    A local launch on several nodes has a command and a run directory on each, and is resumed by them.
    """
    directory = location(spec.supervision.checkpoint_directory)
    nodes_have_commands = spec.placement.launcher == "local" and spec.placement.most_nodes > 1
    if not isinstance(directory, ObjectPath) or nodes_have_commands:
        return None
    return directory / RUNS / spec.run_id


class RecordKeeper:
    """Holds a run in its store while a command supervises it, and keeps its record there as its files change.

    For a run on directories it does nothing.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._folder = spec, record_folder(spec)
        self._hold: Hold | None = None
        self._written: tuple[object, ...] = ()
        self._is_over = threading.Event()
        self._lines: list[str] = []
        self._has_reported = False

    def take(self) -> None:
        """Take the run, before anything is started.

        Raises:
            HeldElsewhere: another command is at work on it, or was since.
        """
        if self._folder is None:
            return
        try:
            self._hold = Hold.take(self._folder, self._spec.directory, Path(self._spec.script).name)
        except HeldElsewhere:
            raise
        except DsplanError as problem:  # where other machines run the ranks, this one may not reach their store
            if self._spec.placement.launcher == "local":
                raise
            notice(f"{problem}; the run can be resumed by its directory alone")

    @contextmanager
    def keep(self, requests: StopRequests) -> Iterator[None]:
        """Keep the record until the block ends, and end the run where another command has taken it."""
        if self._hold is None:
            yield
            return
        thread = threading.Thread(target=self._work, args=(self._hold, requests), daemon=True, name="run record")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            self._finish(self._hold)

    def remarks(self) -> list[str]:
        """Return the lines for people since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def _work(self, hold: Hold, requests: StopRequests) -> None:
        written = float("-inf")
        while not self._is_over.wait(_LOOK_SECONDS):
            try:
                if hold.is_due:
                    hold.renew()
                if not hold.lost_to and time.monotonic() - written >= _LEAST_SECONDS and self._write(hold):
                    written = time.monotonic()
                self._has_reported = False
            except DsplanError as problem:
                self._report(problem)
            if hold.lost_to:
                requests.supersede(f"{hold.lost_to} has resumed this run ({self._folder}); ended here without saving")
                return

    def _write(self, hold: Hold) -> bool:
        """Write the record if a file has changed since, and return whether it was."""
        seen = tuple(_state(self._spec.directory / name) for name in (SPEC_FILE, *_FILES))
        if seen == self._written or seen[0] is None:
            return False
        path, data = _path(hold.mine.folder, hold.mine.number), RunRecord.of(self._spec).to_bytes()
        put(path, lambda: store_of(path).pipe_file(str(path), data), _PATIENCE)
        if not self._written:
            _remove_before(hold.mine)
        self._written = seen
        return True

    def _finish(self, hold: Hold) -> None:
        if hold.lost_to:
            return
        ends = [row for row in read_journal(self._spec.directory) if row.get("event") == "end"]
        try:
            self._write(hold)
            hold.release(str(ends[-1].get("outcome", "")) if ends else "")
        except DsplanError as problem:
            notice(f"{problem}; the run's record in the store is not of its end")

    def _report(self, problem: DsplanError) -> None:
        if not self._has_reported:
            self._lines.append(f"{problem}; the run goes on, and its record in the store is behind until then")
        self._has_reported = True


def _path(folder: ObjectPath, number: int) -> ObjectPath:
    return folder / f"{number:08d}.run.gz"


def _remove_before(mine: Numbered) -> None:
    """Remove what earlier commands wrote, now that this one's record is there."""
    for number in range(max(1, mine.number - 2), mine.number):
        for path in (_path(mine.folder, number), replace(mine, number=number).path):
            path.unlink()


def _state(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        state = path.stat()
        return state.st_mtime_ns, state.st_size
    return None


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def _digest(path: Path) -> str:
    with suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


# A run directory of a record.


@contextmanager
def fetched(
    address: ObjectPath, make_directory: Callable[[Path], Path], *, has_script: bool, has_options: bool
) -> Iterator[Path]:
    """Make a run directory of the run at an address; it is removed again where the block refuses to resume it.

    `make_directory` makes one for a script; `has_script` and `has_options` say that the command names script and
    arguments, or options for the launcher, itself.

    Raises:
        HeldElsewhere: another command is at work on the run.
        DsplanError: there is none to resume, several, or it cannot be resumed here as it was.
    """
    held = _only_unfinished(address)
    wait_until_free(held)
    record = RunRecord.read(held)
    spec = with_secrets(_spec_of(record, held), held.folder, has_script=has_script, has_options=has_options)
    script = Path(spec.script)
    again = f"dsplan run --resume {address} SCRIPT ARGUMENTS"
    if not has_script and not script.is_file():
        raise DsplanError(f"{held.folder}: its script {script} is not here; put it there, or name it: {again}")
    directory = make_directory(script)
    try:
        _lay_out(record, spec, directory, held)
        if not has_script and record.script_digest not in ("", _digest(script)):
            notice(f"{script} is not as it was when the run began")
        notice(f"{held.folder}: resumes {script.name} of {held.holder.host}, in {directory}")
        yield directory
    except DsplanError:
        for name in (*_FILES, SPEC_FILE, GIVEN_PLAN_FILE, HOLD_FILE):
            (directory / name).unlink(missing_ok=True)
        with suppress(OSError):  # it has others in it
            directory.rmdir()
        raise


def _only_unfinished(address: ObjectPath) -> Numbered:
    runs = runs_at(address)
    if not runs:
        raise DsplanError(f"{address}: holds no run to resume; name what --checkpoint-dir named, or a run directory")
    unfinished = [held for held in runs if held.holder.outcome != "completed"]
    if not unfinished:
        raise DsplanError(f"{address}: the run completed, nothing is left to resume; start a new one")
    if len(unfinished) > 1:
        named = ", ".join(f"{held.folder} ({held.holder.script} of {held.holder.host})" for held in unfinished[:4])
        raise DsplanError(f"{address}: {len(unfinished)} runs there can be resumed; name one: {named}")
    return unfinished[0]


def _spec_of(record: RunRecord, held: Numbered) -> LaunchSpec:
    try:
        return from_json(LaunchSpec, json.loads(record.files[SPEC_FILE]))
    except (ValueError, RecursionError, WrongValue):
        raise BrokenFile(held.folder, "is not a run of this version of dsplan", "use the one that began it") from None


def _lay_out(record: RunRecord, spec: LaunchSpec, directory: Path, held: Numbered) -> None:
    """Write the files of a record into a run directory, and the launch as one whose checkpoints are where it is."""
    for name in (*_FILES, GIVEN_PLAN_FILE):
        if name in record.files:
            (directory / name).write_text(record.files[name])
    request = PlanRequest.of(spec.environment)
    if request.plan_file and GIVEN_PLAN_FILE in record.files:
        request = replace(request, plan_file=str(directory / GIVEN_PLAN_FILE))
    replace(
        spec,
        run_directory=str(directory),
        environment={**spec.environment, **request.to_variables()},
        supervision=replace(spec.supervision, checkpoint_directory=str(held.folder.parent.parent)),
    ).save()
    HoldFile(address=str(held.folder), number=held.number).save(directory)
