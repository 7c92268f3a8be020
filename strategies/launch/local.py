"""The ranks of this machine through torch elastic's agent, and the agent's meeting with those of other nodes."""

from __future__ import annotations

import os
import sys

from strategies.launch.launchers.process import ProcessLauncher, launch_environment
from strategies.launch.rendezvous_store import ensure_store
from strategies.launch.spec import LaunchSpec
from strategies.process_variables import Address


class LocalLauncher(ProcessLauncher):
    """The agent process of one attempt. Of several nodes, the one whose address they were given serves the store in
    which they meet."""

    def command(self) -> list[str]:
        at = rendezvous_of(self.spec)
        if at is not None:
            ensure_store(at, self.spec.directory, launch_environment(self.spec))
        return [sys.executable, "-m", "strategies.launch.agent", str(self.spec.path), str(os.getpid())]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}

    def result(self, status: int) -> None:
        """The agent has written it."""


def rendezvous_of(spec: LaunchSpec) -> Address | None:
    """Where the nodes of a run meet; None for a run of one node."""
    if spec.placement.rendezvous is None:
        return None
    host, _, port = spec.placement.rendezvous.rpartition(":")
    return Address(host=host.strip("[]"), port=int(port))
