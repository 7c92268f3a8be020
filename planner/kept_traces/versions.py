"""Versions of what a trace runs, from the packages' metadata: asking the packages themselves would import them."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from planner.errors import DsplanError

_TRACER = ("trace/*.py", "models/transformers_config/*.py", "models/storage_tracker.py")
"""The files of this package that decide what a trace counts."""


def trace_versions() -> dict[str, str]:
    """torch and transformers as installed, transformers empty where it is missing, and the tracer's own version: the
    hash of its code, so that no answer of another tracer is taken for its own.

    Raises:
        DsplanError: torch is not installed.
    """
    torch = _version("torch")
    if not torch:
        raise DsplanError("--exact traces the model with torch, which is not installed; pip install 'dsplan[train]'")
    return {"torch": torch, "transformers": _version("transformers"), "tracer": tracer_version()}


@functools.lru_cache(maxsize=1)
def tracer_version() -> str:
    """The hash of the tracer's files."""
    planner = Path(__file__).parents[1]
    files = sorted(path for pattern in _TRACER for path in planner.glob(pattern))
    code = hashlib.sha256()
    for path in files:
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
