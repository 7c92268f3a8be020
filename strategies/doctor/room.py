"""Room: the ranks of a job that tell each other values through the store in which they met."""

from __future__ import annotations

import json
import time
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from hardware_db.errors import DsplanError

_LOOK_SECONDS = 0.01
_LIMIT_SECONDS = 120.0


class Room:
    """This rank among `ranks` that share a store."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks

    def share(self, topic: str, value: Any) -> list[Any]:
        """What every rank says to a topic, in rank order; every rank says something that JSON knows, once per topic.

        Raises:
            DsplanError: a rank says nothing for two minutes, or rank 0 is gone.
        """
        try:
            self.store.set(f"{topic}/{self.rank}", json.dumps(value))
            return [self._heard(topic, rank) for rank in range(self.ranks)]
        except DistError:
            raise DsplanError(
                f"rank {self.rank} lost rank 0 while the ranks looked at {topic}; its own output says why"
            ) from None

    def leave(self) -> None:
        """Say that this rank needs the store no more; rank 0, with which the store ends, waits for all to have said so.

        Raises:
            DsplanError: a rank says nothing for two minutes.
        """
        if self.rank == 0:
            self.share("leave", None)
        else:
            self.store.set(f"leave/{self.rank}", json.dumps(None))

    def _heard(self, topic: str, rank: int) -> Any:
        until = time.monotonic() + _LIMIT_SECONDS
        key = f"{topic}/{rank}"
        while not self.store.check([key]):
            if time.monotonic() > until:
                raise DsplanError(f"rank {rank} says nothing of its {topic}; its own output says why")
            time.sleep(_LOOK_SECONDS)
        return json.loads(self.store.get(key))
