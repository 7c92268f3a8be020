"""Runs that are submitted to somebody else's nodes: their flags as far as all have them, and how they are followed.

`dsplan run` supervises such a run on its own nodes; the command that submits it only sees the job that keeps it there.
"""

from __future__ import annotations

import queue
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.notices import label_lines
from planner.emit.common import node_layout
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from strategies.launch.grace_period import StopRequests
from strategies.launch.options import RequestedPlacement
from strategies.launch.report import INTERRUPTED, Outcome
from strategies.run_directory.request import named
from strategies.run_directory.spec import STOPPED, Placement

_LOOK_SECONDS, _PAUSE_SECONDS = 1.0, 0.1
_SILENCE_SECONDS = 300.0
"""What does not answer for so long is not followed any more."""
_LAST_WORDS_SECONDS = 5.0
"""For the end of a log behind the end of what writes it."""
_MOST_LETTERS = 48
"""Of a name, from which names of pods and machines of at most 63 are made (`-node-0-0-xxxxx`)."""
_NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{_MOST_LETTERS - 2}}}[a-z0-9])?")
PREEMPTED = Outcome(name="preempted", exit_code=STOPPED)


class Unanswered(DsplanError):
    """The service that keeps the job does not answer now; it may a moment later."""


def why_hopeless(status: int | None, environment: str) -> str:
    """Return why no repetition changes that a node's command ended with a status; empty where one may.

    `environment` is what has dsplan installed, such as "the image".
    """
    reasons = {
        2: "dsplan run refuses it, as its last line above says",
        126: f"the dsplan of {environment} cannot be executed",
        127: f"{environment} has no dsplan command; install dsplan in it",
    }
    return reasons.get(status or 0, "")


# Flags.


def refuse_but(request: Any, *kept: str, why: str) -> None:
    """Refuse the flags of a request other than those to be `kept`.

    Raises:
        ContradictoryRequest: one is there.
    """
    if others := [name for name in named(request) if name not in kept and getattr(request, name)]:
        raise ContradictoryRequest(f"--{others[0].replace('_', '-')} {why}; leave it out")


def refuse_elsewhere(request: Any, launcher: str) -> None:
    """Refuse every flag of a launcher's request for a run under another launcher.

    Raises:
        ContradictoryRequest: one is there.
    """
    given = [item.name for item in fields(request) if getattr(request, item.name)]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise ContradictoryRequest(f"{flag} is for --launcher {launcher}; name that, or leave it out")


def requested_nodes(requested: RequestedPlacement, their_name: str) -> int | None:
    """Return the number of nodes that was requested; `their_name` is what the nodes are called there.

    Raises:
        ContradictoryRequest: another flag of placement is there, or the number is to change.
    """
    if others := named(requested).keys() - {"nodes", "launcher_option"}:
        flag = f"--{min(others).replace('_', '-')}"
        raise ContradictoryRequest(
            f"{flag} is for other launchers, and the {their_name} of a job find each other; leave it out"
        )
    if requested.nodes is None:
        return None
    placement = RequestedPlacement(nodes=requested.nodes).over(Placement())
    if placement.is_elastic:
        fixed = f"a job has a fixed number of {their_name}; give one number"
        raise ContradictoryRequest(f"--nodes {requested.nodes}: {fixed}")
    return placement.most_nodes


def layout(nodes: int | None, processes: int | None, plan: Plan | None, their_name: str) -> tuple[int, int]:
    """Return nodes and ranks on each: the plan's, or those that were requested; a node is there called `their_name`.

    Raises:
        DsplanError: the number of processes is missing, or the plan has others.
    """
    if plan is None:
        if processes is None:
            raise DsplanError(
                f"--nproc is missing: the processes of each {their_name}, one per GPU; nothing here sees its nodes"
            )
        return nodes or 1, processes
    planned = node_layout(plan)
    if (nodes or planned[0], processes or planned[1]) != planned:
        raise ContradictoryRequest(
            f"the plan is for {planned[0]} nodes of {planned[1]} processes; leave --nodes and --nproc out"
        )
    return planned


def job_name(text: str | None, flag: str, script: Path) -> str:
    """Return the name of a job and its run: the one requested with a flag, or the script's and the time.

    Raises:
        DsplanError: it is no name of a job.
    """
    if text is None:
        stem = re.sub("[^a-z0-9]+", "-", script.stem.lower()).strip("-")[:24].strip("-")
        return f"dsplan-{stem or 'run'}-{time.strftime('%m%d-%H%M%S')}"
    if _NAME.fullmatch(text) is None:
        raise DsplanError(
            f"{flag} {quote(text)} is no name of a job; use up to {_MOST_LETTERS} small letters, digits and -,"
            " a letter first"
        )
    return text


# The following.


class FollowedRun(ABC):
    """A submitted run as lines for a terminal: `lines()` to its end, then `outcome`.

    With `requests` a stop of the command stops the run too; without, it only ends the following.
    """

    def __init__(self, name: str, requests: StopRequests | None) -> None:
        self.name, self._requests = name, requests
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Lines that threads have read."""
        self._said: dict[str, str] = {}
        self._is_stopping = False
        self._answered = time.monotonic()
        self.outcome: Outcome | None = None
        """None before the end, and where only the following has ended."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of node 0's `dsplan run`, and with dsplan's label what happens to the job."""
        self._begin()
        looked = float("-inf")
        while self.outcome is None:
            yield from self._heard()
            if self._requests is not None and self._requests.at_once:
                yield label_lines(self._left)
                self.outcome = INTERRUPTED
            elif time.monotonic() - looked >= _LOOK_SECONDS:
                try:
                    if self._requests is not None and self._requests.came and not self._is_stopping:
                        again = "; Ctrl-C again does not wait for that" if self._requests.interrupted else ""
                        line = self._stop()
                        self._is_stopping = True
                        yield label_lines(f"{line}{again}")
                    yield from self._look()
                    self._answered = time.monotonic()
                except Unanswered as problem:
                    yield from self._bear(problem)
                looked = time.monotonic()
            time.sleep(_PAUSE_SECONDS)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while time.monotonic() < deadline and not self._has_read_all():
            time.sleep(_PAUSE_SECONDS)
        yield from self._heard()

    def _heard(self) -> Iterator[str]:
        while not self._news.empty():
            yield self._news.get()

    def _bear(self, problem: Unanswered) -> Iterator[str]:
        """Say once that nobody answers, and give up after a while.

        Raises:
            Unanswered: nobody has for a while; the job may go on.
        """
        if time.monotonic() - self._answered > _SILENCE_SECONDS:
            raise Unanswered(f"{problem}; the job {self.name} is not followed any more, and may go on")
        yield from self._say("answers", str(problem))

    def _say(self, topic: str, text: str) -> Iterator[str]:
        """Yield a line on a topic if it differs from the last one."""
        if text and self._said.get(topic) != text:
            yield label_lines(text)
        self._said[topic] = text

    @property
    def _stopped(self) -> Outcome:
        """The outcome of a run that was asked to stop and has."""
        return INTERRUPTED if self._requests is not None and self._requests.interrupted else PREEMPTED

    @property
    @abstractmethod
    def _left(self) -> str:
        """The line for somebody who does not wait for the end."""

    @abstractmethod
    def _begin(self) -> None:
        """Start the threads that read what is sent."""

    @abstractmethod
    def _stop(self) -> str:
        """Have the run save and end, and return a line on that."""

    @abstractmethod
    def _look(self) -> Iterator[str]:
        """Look at the job, yield what has changed, and set `outcome` if that is the end."""

    @abstractmethod
    def _has_read_all(self) -> bool:
        """Return whether no more lines are to come."""
