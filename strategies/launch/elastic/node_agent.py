"""One node's agent in a run of several: torch elastic's, for one round of its rendezvous.

A round is an attempt of every node. It ends on all nodes when it ends on one, and for one reason, which the agents tell
each other in the rendezvous' store: so all of their supervisors come to one decision. When a node comes that the
run has room for, the ranks are asked to save before all start again with it.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from hardware_db.notices import notice
from hardware_db.probe.cgroup import memory_kills
from strategies.launch.failure_causes import Ending, ending_of
from strategies.launch.grace_period import SIGNAL_SECONDS
from strategies.launch.launchers.process import signal_ranks
from strategies.run_directory.claim import claimed_kind
from strategies.run_directory.files import RESULT_FILE, write_json
from strategies.run_directory.spec import ENDING_KINDS, SAVING, EndingKind, LaunchSpec
from strategies.torch_compat.distributed import Store, leave_rendezvous, present_nodes

# The nodes of a round report its end to each other in the store of the rendezvous.


_HEARD_SECONDS = 3.0
_ENDINGS_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnding:
    """The end of a node's part of a round: the words of an Ending, and the node's number in the round."""

    node: int
    host: str
    kind: EndingKind
    reason: str

    @property
    def priority(self) -> tuple[int, int]:
        """Causes before the effects that they have on other nodes."""
        return ENDING_KINDS.index(self.kind), self.node

    def causes(self, own: EndingKind) -> bool:
        """Return whether this node's own ending is rather the effect of that one."""
        return ENDING_KINDS.index(self.kind) < ENDING_KINDS.index(own)


class RoundEndings:
    """The endings of one round; `node` of `nodes` is this one. A store that is gone has heard and says nothing."""

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self._posted = False

    def post(self, ending: Ending) -> None:
        """Say once why this node's part ended."""
        if self._posted:
            return
        self._posted = True
        reported = {"host": socket.gethostname(), "kind": ending.kind, "reason": ending.reason}
        with suppress(DistError):
            self._store.set(_key(self._node), json.dumps(reported))

    def read(self) -> list[NodeEnding]:
        """Return what the other nodes have said so far."""
        endings = []
        with suppress(DistError):
            for node in range(self._nodes):
                if node != self._node and self._store.check([_key(node)]):
                    endings.append(_parsed(node, self._store.get(_key(node))))
        return endings

    def first(self) -> NodeEnding | None:
        """Return what began the end elsewhere, once the other nodes had a moment to say what happened there."""
        deadline = time.monotonic() + _HEARD_SECONDS
        while len(endings := self.read()) < self._nodes - 1 and time.monotonic() < deadline:
            time.sleep(_ENDINGS_LOOK_SECONDS)
        return min(endings, key=lambda ending: ending.priority, default=None)


def _key(node: int) -> str:
    return f"dsplan/ending/{node}"


def _parsed(node: int, reported: bytes) -> NodeEnding:
    words: dict[str, Any] = json.loads(reported)
    return NodeEnding(node=node, host=str(words["host"]), kind=words["kind"], reason=str(words["reason"]))


_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 5.0
_REMARK_SECONDS = 15.0


class NodePlace(RendezvousHandler):
    """A place at the rendezvous whose rounds are the attempts; no agent's end closes it.

    Elastic's own agent would end the ranks for every node that waits, which here the agent judges, and would end the
    rendezvous for all nodes when the ranks of one fail.
    """

    def __init__(self, rendezvous: DynamicRendezvousHandler, waits_for: str) -> None:
        """`waits_for` follows the number of nodes that are there, in what is said where the others take long."""
        self.rendezvous = rendezvous
        self._waits_for = waits_for

    @property
    def use_agent_store(self) -> bool:
        """True where the ranks use the rendezvous' store."""
        return False

    def get_backend(self) -> str:
        """Return the rendezvous' own word."""
        return self.rendezvous.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes, and say how many are there where that takes long, and when it changes."""
        is_over = threading.Event()
        saying = threading.Thread(target=self._say_who_is_there, args=(is_over,), name="who is there", daemon=True)
        saying.start()
        try:
            return self.rendezvous.next_rendezvous()
        finally:
            is_over.set()
            saying.join()

    def _say_who_is_there(self, is_over: threading.Event) -> None:
        reported = -1
        while not is_over.wait(_REMARK_SECONDS):
            if self.present != reported:
                reported = self.present
                notice(f"{reported} {self._waits_for}", stream="stdout")

    def is_closed(self) -> bool:
        """Return whether the run is over."""
        return self.rendezvous.is_closed()

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self.rendezvous.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return 0, as who waits is the agent's to judge."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's name among those that meet at one address."""
        return self.rendezvous.get_run_id()

    def shutdown(self) -> bool:
        """Leave the rendezvous as it is: the next round needs it."""
        return True

    @property
    def waiting(self) -> int:
        """Nodes that have come since the round began, for which there is room; none where the store is gone."""
        with suppress(RendezvousError):
            return self.rendezvous.num_nodes_waiting()
        return 0

    @property
    def present(self) -> int:
        """Nodes of the round that are heard of. The handler has no public word for it."""
        return present_nodes(self.rendezvous)

    def leave(self) -> None:
        """Give the place up, so that the next round begins without this node before its heartbeat is missed."""
        with suppress(RendezvousError):  # a rendezvous that is gone keeps no places
            leave_rendezvous(self.rendezvous, time.monotonic() + _LEAVE_SECONDS)


@dataclass(slots=True)
class _Regrouping:
    """Nodes have come: since when the ranks are asked to save, and when they were signalled last."""

    since: float
    signalled: float = float("-inf")


class NodeAgent(LocalElasticAgent):
    """Starts this node's ranks for one round and ends them with it; `conclude` says how that was."""

    def __init__(self, launch: LaunchSpec, node_place: NodePlace, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launch, self._place = launch, node_place
        self._endings: RoundEndings | None = None
        self._regrouping: _Regrouping | None = None
        self._looked = float("-inf")
        self._over: Ending | None = None  # why this agent has ended its ranks itself
        self._memory_kills = memory_kills()

    def conclude(self, result: RunResult | None) -> int:
        """Write how the round ended for this node, once the others have said how it ended for them; 0 for success.

        `result.json` is complete when it has a `status`.
        """
        codes = {} if result is None else {rank: failure.exitcode for rank, failure in result.failures.items()}
        path = self._launch.directory / RESULT_FILE
        write_json(path, {"failures": codes})
        if result is not None and result.state == WorkerState.SUCCEEDED:
            write_json(path, {"failures": {}, "status": 0})
            return 0
        own = self._over or self._ending_here()
        first = None
        if self._endings is not None:
            self._endings.post(own)
            first = self._endings.first()
        write_json(path, {"failures": codes, **_words(own, first), "status": 1})
        return 1

    def _ending_here(self) -> Ending:
        ending = ending_of(self._launch.directory, 1, memory_killed=memory_kills() > self._memory_kills)
        # Whoever was stopped on purpose has been notified by its own supervisor; here nodes come or go.
        return Ending(kind="regrouped", reason="nodes come or go") if ending.kind == "preempted" else ending

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        store: Store | None = worker_group.store
        if self._endings is None and store is not None:
            nodes = worker_group.group_world_size or 1
            self._endings = RoundEndings(store, worker_group.group_rank or 0, nodes)
        now = time.monotonic()
        due = now - self._looked >= _LOOK_SECONDS
        if result.state == WorkerState.HEALTHY and due and self._endings is not None:
            self._looked = now
            self._over = self._end_from_outside(self._endings, worker_group.group_world_size or 1, now)
            if self._over is not None:
                return RunResult(state=WorkerState.FAILED)
        return result

    def _end_from_outside(self, endings: RoundEndings, nodes: int, now: float) -> Ending | None:
        """Return why this node's ranks have to end though nothing is wrong with them, or None if they may continue."""
        if endings.read():
            first = endings.first()
            return None if first is None else Ending(kind="lost", reason=f"ended with {first.host}")
        waiting = self._place.waiting
        gone = nodes - self._place.present
        if gone > 0:
            return Ending(kind="lost", reason=f"{gone} of {nodes} nodes are not heard of any more")
        if waiting == 0 or claimed_kind(self._launch.directory) not in SAVING:
            return None
        return self._ask_to_save(waiting, now)

    def _ask_to_save(self, waiting: int, now: float) -> Ending | None:
        """Ask the ranks to save and stop, again and again; the end where they cannot in the time that a stop has."""
        regrouping = self._regrouping or _Regrouping(since=now)
        self._regrouping = regrouping
        if now - regrouping.since > self._launch.supervision.grace_seconds:
            return Ending(kind="regrouped", reason=f"{waiting} nodes came, and the ranks could not save in time")
        if now - regrouping.signalled >= SIGNAL_SECONDS:
            regrouping.signalled = now
            signal_ranks(self._launch, signal.SIGUSR1)
        return None


def _words(own: Ending, first: NodeEnding | None) -> dict[str, object]:
    """Return the launcher's word in `result.json`: what began the end elsewhere, unless it began here."""
    if first is not None and first.causes(own.kind):
        return {"kind": first.kind, "reason": f"on {first.host}: {first.reason}", "node": first.host}
    return {"kind": own.kind, "reason": own.reason}
