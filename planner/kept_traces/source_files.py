"""The files that a module of one's own is written in, by the hash of their contents."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def source_files(modules: Collection[str]) -> dict[str, str]:
    """Path and SHA-256 of the files of loaded modules, and of the user's own modules that these use in turn.

    What an installed package uses is left out: its version speaks for it.
    """
    waiting, seen, files = list(modules), set[str](), dict[str, str]()
    while waiting:
        name = waiting.pop()
        path = getattr(sys.modules.get(name), "__file__", None)
        if name in seen or path is None:
            continue
        seen.add(name)
        if _is_own(path):
            waiting += _used_by(sys.modules[name])
        if _is_own(path) or name in modules:
            files[path] = _digest(path)
    return files


def unchanged(files: Mapping[str, str]) -> bool:
    """Whether every file still has its contents."""
    return all(_digest(path) == digest for path, digest in files.items())


def _is_own(path: str) -> bool:
    return not path.startswith(_INSTALLED) and not _PACKAGES & set(Path(path).parts)


def _used_by(module: ModuleType) -> set[str]:
    """The modules that a module's names are or come from."""
    names = [
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in list(vars(module).values())
    ]
    return {name for name in names if isinstance(name, str)}


def _digest(path: str) -> str:
    """The hash of a file's contents; empty where it cannot be read, which equals no file's."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
