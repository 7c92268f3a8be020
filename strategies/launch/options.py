"""What the command line says of placement and supervision, as the fields that it sets. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from planner import limits
from planner.errors import ContradictoryRequest
from strategies.run_directory.spec import LauncherName

Asked = dict[str, Any]
"""Fields of a value with what they are to be; those that nobody asked for are not in it."""


def asked_placement(
    *,
    launcher: LauncherName | None = None,
    nodes: str | None = None,
    rendezvous: str | None = None,
    hostfile: Path | None = None,
    node_rank: int | None = None,
    options: list[str] | None = None,
) -> Asked:
    """The fields of `Placement` that were asked for.

    Raises:
        DsplanError: `nodes` is no number of nodes, `rendezvous` no address, or `hostfile` no file.
    """
    if hostfile is not None and not hostfile.is_file():
        raise DsplanError(f"--hostfile {hostfile}: no such file; write one line per node into it")
    found: Asked = {
        "launcher": launcher,
        "rendezvous": None if rendezvous is None else _address(rendezvous),
        "hostfile": None if hostfile is None else str(hostfile.resolve()),
        "node_rank": node_rank,
        "options": tuple(options) if options else None,
    }
    if nodes is not None:
        found["least_nodes"], found["most_nodes"] = _nodes(nodes)
    return {name: value for name, value in found.items() if value is not None}


def asked_fields(**values: object) -> Asked:
    """Those of several flags that were asked for: degrees with their schedule, or what is trained."""
    return {name: value for name, value in values.items() if value is not None}


def asked_kernels(text: str | None) -> Asked:
    """`--kernels`: providers by kernel, `all` for one that is meant for every kernel.

    Raises:
        ContradictoryRequest: a kernel has no provider, or two.
    """
    found: dict[str, object] = {}
    for part in (text or "").split(","):
        name, is_pair, provider = (word.strip() for word in part.partition("="))
        name, provider = (name, provider) if is_pair else ("all", name)
        if text is not None and (not name or not provider or name in found):
            raise ContradictoryRequest(f"--kernels {text!r} is read as NAME, or as KERNEL=NAME,KERNEL=NAME; each once")
        if provider:
            found[name] = provider
    return found


_MOST_PROFILED = 100
"""Steps of one profile; a trace of a step takes megabytes."""


def asked_profile(text: str) -> str:
    """`--profile`: a step, or the first and the last of several, as FIRST:LAST.

    Raises:
        DsplanError: they are no such steps.
    """
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last < first + _MOST_PROFILED:
        example = "write 20, or 20:22 for three of them"
        raise DsplanError(f"--profile {quote(text)} names no steps, at most {_MOST_PROFILED}, from 1 on; {example}")
    return f"{first}:{last}"


def asked_supervision(
    *,
    retries: int | None = None,
    checkpoints: tuple[Path | None, int | None, float | None] = (None, None, None),
    hang_minutes: float | None = None,
    grace_seconds: float | None = None,
    tunes: bool = False,
) -> Asked:
    """The fields of `Supervision` that were asked for; `checkpoints` is the directory, every steps, every minutes.

    Raises:
        DsplanError: a time is no number.
    """
    directory, steps, minutes = checkpoints
    limits.RETRIES.check("--retries", retries)
    limits.STEPS.check("--checkpoint-steps", steps)
    limits.MINUTES.check("--checkpoint-minutes", minutes)
    limits.MINUTES.check("--hang-minutes", hang_minutes)
    limits.GRACE_SECONDS.check("--grace-seconds", grace_seconds)
    found: Asked = {
        "retries": retries,
        "checkpoint_directory": None if directory is None else str(directory.resolve()),
        "checkpoint_steps": steps,
        "checkpoint_minutes": minutes,
        "hang_seconds": None if hang_minutes is None else hang_minutes * 60,
        "grace_seconds": grace_seconds,
        "tunes": tunes or None,
    }
    asked = {name: value for name, value in found.items() if value is not None}
    # Who says after how many steps has said when; the clock then saves only if asked to as well.
    if minutes == 0 or (minutes is None and steps is not None):
        asked["checkpoint_minutes"] = None
    return asked


def _nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most <= limits.NODE_RANK.most:
        raise DsplanError(f"--nodes {quote(text)} is no number of nodes; write 4, or 2:4 for at least 2 and at most 4")
    return least, most


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise DsplanError(f"--rendezvous {quote(text)} is no address; write HOST:PORT, such as node0:29400")
    return text
