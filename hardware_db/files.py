"""Files are replaced whole: a reader sees the old text or the new, never half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hardware_db.errors import BrokenFile


def replace_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8 beside `path`, then renames it over `path`; a symbolic link keeps pointing where it did.

    Raises:
        BrokenFile: the directory is missing or not writable, the disk is full, or `path` is a directory or a device.
    """
    temporary: str | None = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise BrokenFile(path, "is not a regular file", "name a file")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
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


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
