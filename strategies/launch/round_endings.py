"""What the nodes of a round tell each other of its end, in the store of the rendezvous."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from strategies.launch.causes import FIRST, Ending
from strategies.launch.endings import EndingKind

_HEARD_SECONDS = 3.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnding:
    """Why a node's part of a round ended: the words of an Ending, and the node's number in the round."""

    node: int
    host: str
    kind: EndingKind
    reason: str

    @property
    def priority(self) -> tuple[int, int]:
        """Causes before the effects that they have on other nodes."""
        return FIRST.index(self.kind), self.node

    def causes(self, own: EndingKind) -> bool:
        """Whether this node's own ending is rather the effect of that one."""
        return FIRST.index(self.kind) < FIRST.index(own)


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
        told = {"host": socket.gethostname(), "kind": ending.kind, "reason": ending.reason}
        with suppress(DistError):
            self._store.set(_key(self._node), json.dumps(told))

    def read(self) -> list[NodeEnding]:
        """What the other nodes have said so far."""
        found = []
        with suppress(DistError):
            for node in range(self._nodes):
                if node != self._node and self._store.check([_key(node)]):
                    found.append(_parsed(node, self._store.get(_key(node))))
        return found

    def first(self) -> NodeEnding | None:
        """What began the end elsewhere, after the other nodes had a moment to say what happened there."""
        deadline = time.monotonic() + _HEARD_SECONDS
        while len(found := self.read()) < self._nodes - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return min(found, key=lambda one: one.priority, default=None)


def _key(node: int) -> str:
    return f"dsplan/ending/{node}"


def _parsed(node: int, told: bytes) -> NodeEnding:
    words: dict[str, Any] = json.loads(told)
    return NodeEnding(node=node, host=str(words["host"]), kind=words["kind"], reason=str(words["reason"]))
