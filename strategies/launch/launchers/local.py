"""The ranks of this machine through torch elastic's agent, and the agent's meeting with those of other nodes."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path

from strategies.distributed.launcher_env import Address
from strategies.launch.elastic.rendezvous_store import ensure_store
from strategies.launch.launchers.process import ProcessLauncher, end, launch_environment
from strategies.run_directory.files import RESULT_FILE
from strategies.run_directory.spec import LaunchSpec

_NODES: dict[Path, subprocess.Popen[bytes]] = {}
"""The agents that hold this process's places among other nodes, by run directory; they end with this process."""


class LocalLauncher(ProcessLauncher):
    """The agent of one attempt, or of all where there are several nodes.

    The node whose address they were given then serves the store in which they meet.
    """

    @property
    def takes_lines(self) -> bool:
        """True for an agent that waits for the next round."""
        return self.spec.placement.rendezvous is not None

    @property
    def ends_its_ranks(self) -> bool:
        """True, as the agent does."""
        return True

    def command(self) -> list[str]:
        """Return the command line of the agent."""
        return [sys.executable, "-m", "strategies.launch.elastic.nodes", str(self.spec.path), str(os.getpid())]

    def environment(self) -> dict[str, str]:
        """Return the environment, with a short shutdown."""
        return {**super().environment(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}

    def result(self, status: int) -> None:
        """Leave the result to the agent, which has written it."""

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the agent, or ask one that is there for the next round."""
        at = rendezvous_of(self.spec)
        if at is None:
            return super().begin()
        ensure_store(at, self.spec.directory, launch_environment(self.spec))
        node = _NODES.get(self.spec.directory)
        if node is None or node.poll() is not None:
            node = _NODES[self.spec.directory] = super().begin()
            atexit.register(end, node)
        assert node.stdin is not None
        node.stdin.write(b"round\n")
        node.stdin.flush()
        return node

    def poll(self) -> int | None:
        """Return the status of the attempt, None while it runs; the agent of one of several nodes outlives it."""
        status = super().poll()
        if status is not None or rendezvous_of(self.spec) is None:
            return status
        path = self.spec.directory / RESULT_FILE
        result = json.loads(path.read_text()) if path.exists() else {}
        return int(result["status"]) if "status" in result else None

    def stop(self) -> None:
        """End the ranks, and an agent among other nodes only with them."""
        if self.poll() is None:
            super().stop()


def rendezvous_of(spec: LaunchSpec) -> Address | None:
    """Return where the nodes of a run meet; None for a run of one node."""
    if spec.placement.rendezvous is None:
        return None
    host, _, port = spec.placement.rendezvous.rpartition(":")
    return Address(host=host.strip("[]"), port=int(port))
