"""Object stores behind checkpoints: `s3://bucket/prefix`, `gs://`, `az://` and what else fsspec knows. No torch.

A store has no rename, so that a checkpoint is complete when its `checksums.json` is there, which is written last and
removed first (`strategies/checkpoint/retention.py`). It is read by ranges, and written by
`strategies/checkpoint/outbox.py`. What fails for a while is tried again.

Who may use a store is the business of its own library, which reads its own variables and files. Nothing here takes,
keeps or prints a secret: of a failure people are given its kind and the store's code for it, never its text.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path, PosixPath
from time import sleep
from typing import Any, BinaryIO, TypeVar, cast

from strategies.errors import BackendMissing, BrokenFile, CannotRun, DsplanError, UnknownName
from strategies.run_directory.heartbeat import beat

T = TypeVar("T")
MANIFEST = "checksums.json"
"""The file of a checkpoint that is written last."""
BEGUN = ".begun"
"""An object in the folder of a checkpoint that is not complete yet."""
_S3 = ("s3fs", "s3", "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
_GS = ("gcsfs", "gs", "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login")
_AZ = ("adlfs", "az", "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and az login")
_STORES = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS, "az": _AZ, "abfs": _AZ, "abfss": _AZ}
"""By scheme: the package that reaches the store, dsplan's extra of it, and where credentials come from."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/(/?)(.*)", re.DOTALL)
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before a call is made again, each a half more or less by chance, so that ranks do not come all at once."""
_RANGE_BYTES = 2**23
"""Of a range that is read: 8 and 16 MB are typical by
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html."""
_LEAST_BYTES = 2**20
"""Read at least, wherever that is."""
_MOST_RANGES = 8
"""Ranges read at once where a file is read from end to end."""
_LOOKERS = 16
"""Objects that are looked at together."""
_MOMENTS = ("LastModified", "last_modified", "updated", "mtime", "created")
"""By which names fsspec's file systems say when an object was written."""
_BUGS = (TypeError, AttributeError, NameError, NotImplementedError, AssertionError, MemoryError)
_DENIED = frozenset(
    {
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
        "ClientAuthenticationError",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
    }
)
"""The codes of S3 and Azure, and the words of the latter's library, for who may not do what."""


class Unreachable(BrokenFile):
    """An object store that cannot be used, now or at all; what it holds is as it was."""


class ObjectPath(PosixPath):
    """An address in an object store, as a path: names and parents as ever; what is there is asked of the store.

    A folder is there when its `checksums.json` is. Functions of the operating system take none.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}"

    def __fspath__(self) -> str:
        raise CannotRun(f"{self} lies in an object store, and this needs a directory: name one")

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPath, (str(self),)

    def absolute(self) -> ObjectPath:
        """Return the address, which is one from everywhere."""
        return self

    def resolve(self, strict: bool = False) -> ObjectPath:
        """Return the address, which is one from everywhere."""
        return self

    def is_dir(self, **named: Any) -> bool:
        """Return whether this is a complete checkpoint."""
        return self.joinpath(MANIFEST).is_file()

    exists = is_dir

    def is_file(self, **named: Any) -> bool:
        """Return whether there is an object of this name."""
        return look_at(self) is not None

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def write_bytes(self, data: Any) -> int:
        """Put an object there, whole or not at all."""
        put(self, lambda: store_of(self).pipe_file(str(self), bytes(data)))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        with suppress(FileNotFoundError):
            persist(self, lambda: store_of(self).rm_file(str(self)))


def location(text: str | Path) -> Path:
    """Return the directory that a text names: an `ObjectPath` for the address of an object store, else a path.

    Raises:
        CannotRun: the address has a secret in it, or no bucket.
    """
    if isinstance(text, ObjectPath):
        return text
    match = _ADDRESS.fullmatch(str(text))
    if match is None or (not match[2] and match[1] not in _STORES):  # a Path has one slash left
        return Path(text)
    scheme, rest = match[1], match[3].strip("/")
    bucket = rest.partition("/")[0]
    if "?" in rest or ":" in bucket or ("@" in bucket and not scheme.startswith("abfs")):
        raise CannotRun(
            f"{scheme}://...: an address has no passwords and no parameters; give {scheme}://BUCKET/PREFIX, and"
            f" credentials by {_credentials(scheme)}"
        )
    if not bucket:
        raise CannotRun(f"{scheme}:// names no bucket; give {scheme}://BUCKET/PREFIX")
    return Path("/", rest) if scheme == "file" else ObjectPath(f"{scheme}://{rest}")


def require_usable(directory: Path) -> None:
    """Write and remove a small object where checkpoints are to go, with little patience; look at no directory.

    Raises:
        BackendMissing: the package that reaches the store is not installed.
        Unreachable: the store refuses, has no such bucket, or does not answer.
    """
    if isinstance(directory, ObjectPath):
        probe = directory / f".dsplan-{os.getpid()}"
        put(directory, lambda: store_of(directory).pipe_file(str(probe), b""), _PAUSES[:2])
        probe.unlink()


# Calls, and what becomes of those that fail.


def persist(path: Path, call: Callable[[], T], pauses: Sequence[float] = _PAUSES) -> T:
    """Return what a call of a store returns; where it fails for a reason that may pass, call again after a pause.

    Raises:
        FileNotFoundError: there is no such object.
        FileExistsError: there is one, and the call was to make it.
        Unreachable: the store refuses, or did not answer after any of the pauses.
    """
    for pause in (*pauses, None):
        try:
            return call()
        except (FileNotFoundError, FileExistsError, DsplanError, *_BUGS):
            raise
        except Exception as problem:  # each library has its own
            if _word_of(problem) == "PreconditionFailed":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            refusal = _refusal(path, problem)
            if refusal is not None:
                raise refusal from None
            if pause is None:
                remedy = "look at the network and the address; what is there already stays"
                raise Unreachable(path, f"the object store does not answer ({_word_of(problem)})", remedy) from None
        sleep(pause * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def put(target: Path, call: Callable[[], object], pauses: Sequence[float] = _PAUSES) -> None:
    """Make a call that writes to a store.

    Raises:
        Unreachable: as `persist`, or there is no such bucket.
    """
    try:
        persist(target, call, pauses)
    except FileNotFoundError:
        raise _no_bucket(target) from None


def create(target: Path, data: bytes) -> bool:
    """Put an object where there is none, and return whether it was put: of several processes at once, one does.

    That holds where the store keeps its word of conditional writes (`If-None-Match`, `ifGenerationMatch`).

    Raises:
        Unreachable: as `put`.
    """
    try:
        put(target, lambda: store_of(target).pipe_file(str(target), data, mode="create"))
    except FileExistsError:
        return read_small(target, len(data)) == data  # else it was put, and the answer was lost
    return True


def _refusal(path: Path, problem: Exception) -> Unreachable | None:
    """Return the failure that no second call will change, or None."""
    word, scheme = _word_of(problem), str(path).partition(":")[0]
    if "Credentials" in word:
        return _no_credentials(path)
    if word == "ContainerNotFound":  # which adlfs passes on as no FileNotFoundError
        return _no_bucket(path)
    if isinstance(problem, PermissionError) or word in _DENIED:
        return Unreachable(path, f"the object store denies access ({word})", f"see {_credentials(scheme)}")
    return None


def _word_of(problem: BaseException) -> str:
    """Return the store's code for a failure, else the kind of the exception: never a text, which may hold a secret."""
    cause: BaseException | None = problem
    while cause is not None:
        response = getattr(cause, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        azure_code = getattr(cause, "error_code", None)
        code = getattr(azure_code, "value", azure_code) or code
        if isinstance(code, str) and re.fullmatch(r"\w{1,40}", code):
            return code
        cause = cause.__cause__ or cause.__context__
    return type(problem).__name__


def _no_credentials(path: Path) -> Unreachable:
    scheme = str(path).partition(":")[0]
    return Unreachable(path, "no credentials for the object store", f"give them by {_credentials(scheme)}")


def _credentials(scheme: str) -> str:
    return _STORES[scheme][2] if scheme in _STORES else "its library's own variables"


def store_of(path: Path) -> Any:
    """Return fsspec's file system for an address.

    Raises:
        BackendMissing: its package is not installed.
        UnknownName: there is none.
    """
    import fsspec  # a third of a second, which a run on directories need not spend

    scheme = str(path).partition(":")[0]
    package, extra, _ = _STORES.get(scheme, (f"a package for {scheme}://", "", ""))
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError:
        install = f"pip install 'dsplan[{extra}]'" if extra else "install it"
        raise BackendMissing(f"{path}: needs {package}, which is not installed; {install}") from None
    except ValueError:
        if scheme in _STORES:
            raise _no_credentials(path) from None
        raise UnknownName("object store", scheme, _STORES, hint=f"one of {', '.join(_STORES)}") from None


# What is there.


def look_at(path: Path) -> dict[str, Any] | None:
    """Return an object's `size` in bytes and `modified`, in seconds since 1970; None where there is none."""
    store = store_of(path)

    def look() -> dict[str, Any]:
        info = store.info(str(path))
        if info["type"] != "file":
            raise FileNotFoundError(str(path))
        return {"size": info["size"], "modified": _modified(info)}

    try:
        return persist(path, look)
    except FileNotFoundError:
        return None


def look_at_all(paths: Sequence[Path]) -> list[dict[str, Any] | None]:
    """Look at several objects together."""
    if len(paths) < 2:
        return [look_at(path) for path in paths]
    with ThreadPoolExecutor(min(_LOOKERS, len(paths))) as lookers:
        return list(lookers.map(look_at, paths))


def names_in(directory: Path) -> list[str]:
    """Return the names of objects and folders right below an address.

    Raises:
        Unreachable: there is no such bucket.
    """
    try:
        rows = persist(directory, lambda: store_of(directory).ls(str(directory), detail=False))
    except FileNotFoundError:
        _require_bucket(directory)
        return []
    names = (row.rstrip("/").rpartition("/")[2] for row in rows)
    return sorted({name for name in names if name and name != directory.name})


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of all objects below an address, by their names there."""
    store = store_of(folder)
    try:
        rows = persist(folder, lambda: store.find(str(folder), detail=True))
    except FileNotFoundError:
        return {}
    above = store._strip_protocol(str(folder)).rstrip("/") + "/"
    return {name.removeprefix(above): row["size"] for name, row in rows.items()}


def remove_all(folder: Path) -> None:
    """Remove all objects below an address."""
    with suppress(FileNotFoundError):
        persist(folder, lambda: store_of(folder).rm(str(folder), recursive=True))


def _require_bucket(path: Path) -> None:
    scheme, bucket = str(path).split("://")[0], path.parts[1]
    is_there = True
    with suppress(Unreachable):  # who may not look at a bucket may still use what is in it
        is_there = persist(path, lambda: store_of(path).exists(f"{scheme}://{bucket}"))
    if not is_there:
        raise _no_bucket(path)


def _no_bucket(path: Path) -> Unreachable:
    return Unreachable(path, f"there is no bucket {path.parts[1]}", "make it, or name another")


def _modified(info: Mapping[str, Any]) -> float:
    """Return when an object was written, by whichever name its store has for that."""
    moment = next((info[name] for name in _MOMENTS if info.get(name)), 0.0)
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


# Reading.


def read_small(path: Path, most_bytes: int) -> bytes | None:
    """Return an object of at most so many bytes in memory; None where there is none.

    Raises:
        BrokenFile: it is larger.
        Unreachable: the store refuses, or does not answer.
    """
    try:
        data = persist(path, lambda: bytes(store_of(path).cat_file(str(path), start=0, end=most_bytes + 1)))
    except FileNotFoundError:
        return None
    if len(data) > most_bytes:
        raise BrokenFile(path, f"has more than {most_bytes} bytes", "it is not dsplan's")
    return data


class ObjectFile(io.RawIOBase):
    """An object, read by ranges; more of them at once where it is read from end to end."""

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self._path, self._store = path, store_of(path)
        self._at, self._ranges = 0, 1
        self._begin, self._data = 0, b""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[BinaryIO]:
        """Open an object.

        Raises:
            FileNotFoundError: there is none.
        """
        state = look_at(path)
        if state is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with cls(path, state["size"]) as file:
            yield cast("BinaryIO", file)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read some bytes, none only at the end."""
        view = memoryview(buffer).cast("B")
        length = min(len(view), self.size - self._at)
        if length <= 0:
            return 0
        if not self._begin <= self._at < self._begin + len(self._data):
            self._fetch(length)
        data = memoryview(self._data)[self._at - self._begin :][:length]
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _fetch(self, length: int) -> None:
        """Read what is wanted; and further, twice as far as before, where that is where the last range ended."""
        is_next = self._at == self._begin + len(self._data) and self._at > 0
        self._ranges = min(2 * self._ranges, _MOST_RANGES) if is_next else 1
        further = _RANGE_BYTES * self._ranges if is_next else _LEAST_BYTES
        ends = min(self.size, self._at + max(further, min(length, _MOST_RANGES * _RANGE_BYTES)))
        starts = list(range(self._at, ends, _RANGE_BYTES))
        stops = [min(start + _RANGE_BYTES, ends) for start in starts]
        paths = [str(self._path)] * len(starts)
        pieces = persist(self._path, lambda: self._store.cat_ranges(paths, starts, stops, on_error="raise"))
        self._begin, self._data = self._at, pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(self._data) != ends - self._begin:
            raise BrokenFile(self._path, "was cut while it was read", "name another checkpoint")
        beat()
