"""Why a rank or an attempt ended, in words that ranks, supervisor, journal and last page share. No torch."""

from __future__ import annotations

from typing import Literal, get_args

from planner.errors import NothingFits

EndingKind = Literal[
    "failed",  # the script raised, or ended with a status of its own
    "refused",  # what was asked for cannot be run: an expected failure that no repetition mends
    "out_of_memory",  # of a GPU, of the host, or of the cgroup
    "killed",  # a signal from outside
    "hung",  # no progress for `Orders.hang_seconds`
    "not_finite",  # losses or gradients that stay NaN or infinite
    "disk_full",  # a checkpoint or a log could not be written
    "lost",  # the node or the connection to it is gone
    "preempted",  # SIGTERM or SIGUSR1: saved, and stopped on purpose
    "switch",  # saved, and stopped on purpose to go on under a better plan
    "regrouped",  # nodes came or went: saved, and all start again together
]
ENDING_KINDS: tuple[EndingKind, ...] = get_args(EndingKind)
STOPS: tuple[EndingKind, ...] = ("preempted", "switch", "regrouped")
"""Endings on purpose: the ranks saved before them."""

STOPPED = 75
"""Exit status of a rank that saved and stopped on purpose, and of `dsplan run` when it was preempted: EX_TEMPFAIL of
sysexits.h, "try again later". `rank{N}.failure.json` has the kind."""


def exit_status_of(kind: EndingKind, error_type: str) -> int:
    """The exit status of a rank or a run that ended so: 2 cannot be run, 1 failed or no plan fits."""
    if kind in ("preempted", "switch"):
        return STOPPED
    return 2 if kind == "refused" and error_type != NothingFits.__name__ else 1
