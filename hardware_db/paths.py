"""Where dsplan keeps what it learns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DATABASE_NAME = "dsplan.db"


def data_dir() -> Path:
    """The user data directory: `DSPLAN_HOME` where it is set, else what the platform prescribes, plus `dsplan`.

    That is `$XDG_DATA_HOME` or `~/.local/share` (a relative one is ignored, as the XDG specification demands),
    `~/Library/Application Support` on macOS, `%LOCALAPPDATA%` on Windows. The directory may not exist yet.
    """
    if home := os.environ.get("DSPLAN_HOME"):
        return Path(home).expanduser()
    return _platform_data_dir() / "dsplan"


def database_path() -> Path:
    """The database that every command uses unless it is told another."""
    return data_dir() / DATABASE_NAME


def database_is_there() -> bool:
    """Whether anything has the database's name; also where it cannot be looked at, or is a link that leads nowhere, so
    that opening it says what is wrong."""
    try:
        os.lstat(database_path())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _platform_data_dir() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    configured = Path(os.environ.get("XDG_DATA_HOME", ""))
    return configured if configured.is_absolute() else Path.home() / ".local" / "share"
