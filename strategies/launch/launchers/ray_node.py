"""The ranks of one node, in an actor of Ray: it starts them, hands signals on to them, and ends with them. No torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hardware_db.errors import DsplanError
from strategies.distributed.network import find_free_port
from strategies.launch.launchers.process import rank_command
from strategies.run_directory.spec import STOPPED, LaunchSpec
from strategies.variables import AGENT_PID

_LOOK_SECONDS = 0.1
# Ray gives each actor the GPUs that it has reserved for it in one of these.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAddress:
    """A node of the cluster that has been reserved."""

    node_id: str
    host: str
    address: str
    """By which the other nodes reach it."""
    port: int
    """Which nothing had there when this was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStart:
    """Everything that a node needs to start its ranks."""

    spec_path: str
    first_rank: int
    world_size: int
    meeting_point: NodeAddress
    """Rank 0's node."""
    has_gpus: bool
    """Whether Ray has reserved GPUs for the ranks."""
    directory: str
    """In which the command was started."""
    variables: dict[str, str] = field(default_factory=dict)
    """The command's environment."""


class NodeRanks:
    """The ranks of one node. Runs in an actor with several threads, so that `signal` and `end` reach a `run`."""

    def __init__(self) -> None:
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._is_ending = False

    def address(self) -> NodeAddress:
        """Return where this node is, and a port at which its ranks may wait for the others."""
        import ray

        return NodeAddress(
            node_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            port=find_free_port(),
        )

    def run(self, start: NodeStart) -> dict[int, int]:
        """Start the ranks; return the exit statuses of those that have ended, once all have, or one not as it should.

        Ranks that `end` has ended are left out.

        Raises:
            DsplanError: the run directory is not seen on this node.
        """
        path = Path(start.spec_path)
        if not path.exists():
            raise DsplanError(
                f"{path.parent} is not there on {socket.gethostname()}; name a --run-dir on a file system that all"
                " nodes share"
            )
        spec = LaunchSpec.load(path)
        directory = start.directory if Path(start.directory).is_dir() else None
        for local_rank in range(spec.processes):
            self._ranks[start.first_rank + local_rank] = subprocess.Popen(
                rank_command(spec),
                stdin=subprocess.DEVNULL,
                cwd=directory,
                env=rank_variables(start, spec.processes, local_rank),
                # Ctrl-C in a terminal with a Ray of this machine is the command's alone.
                start_new_session=True,
            )
        while not self._is_ending:
            codes = self._codes()
            if len(codes) == spec.processes or any(code not in (0, STOPPED) for code in codes.values()):
                return codes
            time.sleep(_LOOK_SECONDS)
        return self._codes()

    def signal(self, number: int) -> None:
        """Send a signal to every rank here."""
        for process in list(self._ranks.values()):
            if process.poll() is None:
                process.send_signal(number)

    def end(self, seconds: float) -> dict[int, int]:
        """Kill the ranks that have not ended within some seconds; return the exit statuses of those that have."""
        deadline = time.monotonic() + seconds
        while len(codes := self._codes()) < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        self._is_ending = True
        for process in self._ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return codes

    def _codes(self) -> dict[int, int]:
        """Return the exit statuses of the ranks that have ended, negative for a signal."""
        codes = {rank: process.poll() for rank, process in list(self._ranks.items())}
        return {rank: code for rank, code in codes.items() if code is not None}


def rank_variables(start: NodeStart, processes: int, local_rank: int) -> dict[str, str]:
    """Return a rank's environment: the command's, with the GPUs that Ray has reserved, and torchrun's variables."""
    own = {name: os.environ[name] for name in _VISIBLE if start.has_gpus and name in os.environ}
    return {
        **os.environ,
        **{name: value for name, value in start.variables.items() if not name.startswith("RAY_")},
        **own,
        "RANK": str(start.first_rank + local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": start.meeting_point.address,
        "MASTER_PORT": str(start.meeting_point.port),
        AGENT_PID: str(os.getpid()),
    }
