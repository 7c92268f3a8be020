"""Files: replaced whole, so that a reader sees the old text or the new and never half of one; and small ones read."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import Any

# Paths of the database and the caches.


HOME = "DSPLAN_HOME"
"""The environment variable that names the directory."""
DATABASE = "DSPLAN_DATABASE"
"""The environment variable that names another database: a `postgresql://` address, or the path of a SQLite file."""
DATABASE_NAME = "dsplan.db"
_SERVERS = ("postgresql://", "postgres://")


def data_dir() -> Path:
    """Return the user data directory: `DSPLAN_HOME` where it is set, else what the platform prescribes, plus `dsplan`.

    That is `$XDG_DATA_HOME` or `~/.local/share` (a relative one is ignored, as the XDG specification demands),
    `~/Library/Application Support` on macOS, `%LOCALAPPDATA%` on Windows. The directory may not exist yet.
    """
    if home := os.environ.get(HOME):
        return Path(os.path.expanduser(home))
    return _platform_data_dir() / "dsplan"


def runs_dir() -> Path:
    """Return where run directories lie that nobody named."""
    return data_dir() / "runs"


def database_path() -> Path:
    """Return the SQLite file of this user: the database of every command unless `DSPLAN_DATABASE` names a server."""
    named = os.environ.get(DATABASE, "")
    return Path(os.path.expanduser(named)) if named and not database_address() else data_dir() / DATABASE_NAME


def database_address() -> str | None:
    """Return the address of the PostgreSQL database that `DSPLAN_DATABASE` names, or None.

    Raises:
        DsplanError: it is the address of something else.
    """
    return server_address(os.environ.get(DATABASE, "").strip(), DATABASE)


def server_address(text: str, named_by: str) -> str | None:
    """Return a text that is the address of a PostgreSQL database; None for a path. `named_by` names it in the error.

    Raises:
        DsplanError: it is the address of something else.
    """
    if text.startswith(_SERVERS):
        return text
    if "://" in text:
        scheme = text.partition("://")[0]
        remedy = "use postgresql:// or a path"
        raise DsplanError(f"{named_by}: {scheme}:// is no database that dsplan knows; {remedy}")
    return None


def database_name() -> str:
    """Return the database of every command as people are told it, without a password."""
    address = database_address()
    return without_password(address) if address else str(database_path())


def without_password(address: str) -> str:
    """Return the address of a database without the secrets in it: the user's password, and those among parameters."""
    from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

    parts = urlsplit(address)
    user, at, hosts = parts.netloc.rpartition("@")
    shown = [(key, value) for key, value in parse_qsl(parts.query) if "password" not in key.lower()]
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}{at}{hosts}", query=urlencode(shown)))


def database_is_there() -> bool:
    """Return whether anything has the database's name.

    Also where it cannot be looked at, is a link that leads nowhere, or is on a server, so that opening it says what is
    wrong.
    """
    if database_address():
        return True
    try:
        os.lstat(database_path())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def provide_torch_extensions(variables: MutableMapping[str, str]) -> None:
    """Have torch compile DeepSpeed's operators in a temporary directory where the usual cache cannot be written.

    The usual one is in `~/.cache`. Nothing changes where TORCH_EXTENSIONS_DIR names one.
    """
    import tempfile

    if "TORCH_EXTENSIONS_DIR" in variables:
        return
    cache = Path(variables.get("XDG_CACHE_HOME") or _home() / ".cache")
    if _can_be_written(cache / "torch_extensions"):
        return
    # What is compiled there is loaded as code, so it must be nobody else's.
    own = Path(tempfile.gettempdir(), f"torch_extensions-{os.getuid()}-py{sys.version_info[0]}{sys.version_info[1]}")
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        is_own = own.stat().st_uid == os.getuid() and not own.is_symlink()
    except OSError:
        is_own = False
    variables["TORCH_EXTENSIONS_DIR"] = str(own) if is_own else tempfile.mkdtemp(prefix="torch_extensions-")


def _can_be_written(directory: Path) -> bool:
    """Return whether a directory, or the first above it that is there, takes new files."""
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _platform_data_dir() -> Path:
    home = _home()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    configured = Path(os.environ.get("XDG_DATA_HOME", ""))
    return configured if configured.is_absolute() else home / ".local" / "share"


def _home() -> Path:
    """Return the user's home directory, or the root where nobody knows of one, as for a user id without a name."""
    home = Path(os.path.expanduser("~"))
    return home if home.is_absolute() else Path(os.sep)


# One spelling of a JSON value, so that equal values have equal text and equal hashes.


def canonical_json(value: object) -> str:
    """`value` as ASCII JSON with sorted keys and no spaces; NaN and infinities raise ValueError, being no JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: object, length: int) -> str:
    """Return the first `length` hexadecimal digits of the SHA-256 of the canonical JSON of `value`."""
    import hashlib

    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def replace_text(path: Path, text: str) -> None:
    """Replace a file by `text` as UTF-8; see `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, then rename it over `path`; a symbolic link keeps pointing where it did.

    Raises:
        BrokenFile: the directory is missing or not writable, the disk is full, or `path` is a directory or a device.
    """
    import tempfile

    temporary: str | None = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise BrokenFile(path, "is not a regular file", "name a file")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(descriptor, "wb") as file:
            file.write(content)
        # mkstemp makes files for their owner alone; this one gets what `open` would have given it.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise BrokenFile(
            path, f"cannot be written ({error.strerror})", "name a file in a directory you can write to"
        ) from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def replace_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file of dsplan's own by `text`: a reader sees the old text or the new, and a failure leaves the old.

    `durable` waits until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    with replacement(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacement(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Return a hidden name beside `path` to write to.

    Where the block ends well, what was written takes the place of `path`.

    Raises:
        OSError: it cannot be written; nothing is left beside the old file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file's bytes or a folder's names; Windows writes those by itself.

    Raises:
        OSError: the disk refuses.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# The small text files of /proc and /sys; a file that is not there or not readable is None.


def read_text(path: Path) -> str | None:
    """Return the stripped text of a file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the whole number in a file, or None if there is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text.split()[0], 0)
    except (ValueError, IndexError):
        return None


def children(path: Path) -> list[Path]:
    """Return the entries of a directory in order of name, empty where it is not there."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def read_shipped_yaml(path: Path) -> Any:
    """Return the document of a YAML file that dsplan ships, by libyaml where PyYAML has it: ten times as fast."""
    import yaml  # slow to import

    return yaml.load(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
