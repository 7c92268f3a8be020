"""A rank's part of a checkpoint on its way: into a folder that all ranks share, or to an object store. No torch.

To a store files are sent from a folder on a local disk, each as soon as it is whole, while the next is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from hardware_db.files import replace_whole
from strategies.checkpoint.object_store import BEGUN, MANIFEST, ObjectFile, put, sizes_in, store_of
from strategies.checkpoint.retention import write_text
from strategies.errors import CannotRun
from strategies.run_directory.heartbeat import beat
from strategies.variables import STAGING, STAGING_GB

_PIECE_BYTES = 2**28
"""Of one file of a rank in a store, if no tensor is larger: what is sent again where sending failed."""
_SENDERS = 2
"""Files that a rank sends at once. s3fs sends the parts of a file together, so that all of it is in memory."""
_LOOK_SECONDS = 0.01
"""Between two looks of rank 0 at what the others have written."""
_LEAST_STORE_LOOK_SECONDS, _MOST_STORE_LOOK_SECONDS = 0.05, 2.0
"""The same in a store, where each costs a request."""


class SharedFolder:
    """The folder that all ranks write a checkpoint's parts into, and leave each other notes in.

    `Outbox` is the same for a store, to which files are sent from `folder`.
    """

    is_shared = True
    file_bytes: int | None = None
    """How long a rank's files are at most; None: it writes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_room(self, size: int) -> None:
        """Wait until a file of so many bytes may be written: at once, and the disk says if it cannot."""

    def send(self, name: str) -> None:
        """Do nothing with a file that is whole: it is where it belongs."""

    def flush(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: rank 0 gives the folder its name, or removes it."""

    def leave_note(self, name: str, text: str) -> None:
        """Leave word to the other ranks."""
        replace_whole(self.folder / name, text)

    def read_note(self, name: str) -> str:
        """Read what another rank left."""
        return (self.folder / name).read_text()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the files, by name; others write, and rename what they have written."""
        return sizes_of_files(self.folder)

    def pause(self, waited: float) -> float:
        """Return the seconds until the next look at what is there."""
        return _LOOK_SECONDS

    def remove_notes(self, notes: Iterable[str]) -> None:
        """Leave nothing but the checkpoint's files."""
        for name in notes:
            (self.folder / name).unlink()

    def complete(self, checksums: str) -> None:
        """Add the checksums."""
        write_text(self.folder / MANIFEST, checksums)


class Staging:
    """A folder of this process's on a local disk, for files that are on their way to a store.

    It goes with the process; one that was killed leaves its own, which the next one removes.
    """

    def __init__(self, ranks_here: int) -> None:
        root = Path(os.environ.get(STAGING) or Path(tempfile.gettempdir(), f"dsplan-staging-{os.getuid()}"))
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in root.glob("sending-*"):
            self._remove_unlocked(left)
        self.folder = Path(tempfile.mkdtemp(prefix="sending-", dir=root))
        self._lock = self._locked(self.folder)
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._ranks_here = ranks_here

    def limit_bytes(self) -> int:
        """Return what this rank's files may fill: its part of the node's."""
        text = os.environ.get(STAGING_GB, "")
        try:
            node = float(text) * 1e9 if text else shutil.disk_usage(self.folder).free / 2
        except ValueError:
            node = -1.0
        if not node > 0:
            raise CannotRun(f"{STAGING_GB}={text} is no size; give the gigabytes that may be filled, as 100")
        return int(node / self._ranks_here)

    @staticmethod
    def _locked(folder: Path) -> int | None:
        """Lock a folder while this process lives; None where another has."""
        import fcntl  # not on Windows

        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return lock

    def _remove_unlocked(self, folder: Path) -> None:
        with suppress(OSError):
            lock = self._locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


class Outbox:
    """A rank's part of a checkpoint on its way to a store: `SharedFolder` says what for.

    A file is sent as soon as it is whole, and then removed. A writer waits in `make_room` while those that wait fill
    their limit; one file may always be there, however large.
    """

    is_shared = False

    def __init__(self, target: Path, staging: Staging) -> None:
        self.folder, self.limit_bytes = staging.folder / target.name, staging.limit_bytes()
        self.folder.mkdir()
        self._target = target
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="send")
        self._is_given_up = False
        self._sending: dict[Future[None], int] = {}

    @property
    def file_bytes(self) -> int:
        """The size of files, at which some are sent while the next is written."""
        return min(_PIECE_BYTES, self.limit_bytes // (2 * _SENDERS))

    def make_room(self, size: int) -> None:
        """Wait until a file of so many bytes may be written."""
        while self._sending and sum(self._sending.values()) + size > self.limit_bytes:
            self._settle()

    def send(self, name: str) -> None:
        """Send a file that is whole."""
        size = (self.folder / name).stat().st_size
        self._sending[self._senders.submit(self._send, name)] = size

    def flush(self) -> None:
        """Wait until all is there.

        Raises:
            Unreachable: a file could not be sent.
        """
        while self._sending:
            self._settle()

    def close(self) -> None:
        """Give up what waits."""
        self._is_given_up = True
        self._senders.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def leave_note(self, name: str, text: str) -> None:
        """Leave word to the other ranks."""
        (self._target / name).write_bytes(text.encode())

    def read_note(self, name: str) -> str:
        """Read what another rank left."""
        with ObjectFile.open(self._target / name) as file:
            return file.read().decode()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all that is there, by name."""
        return sizes_in(self._target)

    def pause(self, waited: float) -> float:
        """Return the seconds until the next look at what is there: a twentieth of those that were waited."""
        return min(max(waited / 20, _LEAST_STORE_LOOK_SECONDS), _MOST_STORE_LOOK_SECONDS)

    def remove_notes(self, notes: Iterable[str]) -> None:
        """Leave nothing but the checkpoint's files."""
        for name in (*notes, BEGUN):
            (self._target / name).unlink()

    def complete(self, checksums: str) -> None:
        """Make the checkpoint complete by its checksums."""
        (self._target / MANIFEST).write_bytes(checksums.encode())

    def _settle(self) -> None:
        for sent in wait(self._sending, return_when=FIRST_COMPLETED).done:
            del self._sending[sent]
            sent.result()

    def _send(self, name: str) -> None:
        if self._is_given_up:
            return
        try:
            put_file(self.folder / name, self._target / name)
        except BaseException:
            self._is_given_up = True
            raise
        (self.folder / name).unlink()


def put_file(file: Path, target: Path) -> None:
    """Copy a file to a store, in parts where its library does, and beat as they arrive.

    Raises:
        Unreachable: it cannot be sent.
    """
    from fsspec.callbacks import Callback

    class Beats(Callback):  # type: ignore[misc]
        def call(self, *arguments: Any, **named: Any) -> None:
            beat()

    put(target, lambda: store_of(target).put_file(str(file), str(target), callback=Beats()))


Part = SharedFolder | Outbox


def sizes_of_files(folder: Path) -> dict[str, int]:
    """Return the bytes of the files in a folder where others write, and rename what they have written, by name."""
    sizes = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes
