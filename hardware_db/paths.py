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
        return Path(os.path.expanduser(home))
    return _platform_data_dir() / "dsplan"


def database_path() -> Path:
    """The database that every command uses unless it is told another."""
    return data_dir() / DATABASE_NAME


def _platform_data_dir() -> Path:
    home = _home()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    configured = Path(os.environ.get("XDG_DATA_HOME", ""))
    return configured if configured.is_absolute() else home / ".local" / "share"


def _home() -> Path:
    """The user's home directory, or the root where nobody knows of one, as for a user id without a name."""
    home = Path(os.path.expanduser("~"))
    return home if home.is_absolute() else Path(os.sep)
