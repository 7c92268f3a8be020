"""Versions of what a trace runs, from the packages' metadata: asking the packages themselves would import them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from planner.errors import DsplanError

TRACE_FORMAT = 1
"""Raised whenever the tracer counts differently, so that older answers are not taken for its own."""


def trace_versions() -> dict[str, str]:
    """torch and transformers as installed (transformers is empty where it is missing), and the tracer's own format.

    Raises:
        DsplanError: torch is not installed.
    """
    torch = _version("torch")
    if not torch:
        raise DsplanError("--exact traces the model with torch, which is not installed; pip install 'dsplan[train]'")
    return {"torch": torch, "transformers": _version("transformers"), "trace": str(TRACE_FORMAT)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
