"""One node among those of its run: it keeps its place at their rendezvous from attempt to attempt.

The process lives as long as the node's `dsplan run` does, and starts the ranks of one round for every line that it
reads. Between rounds it holds its place, so that the others, who start again sooner, wait for it.
"""

from __future__ import annotations

import errno
import inspect
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import TextIO, cast

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from hardware_db.units import format_seconds
from strategies.distributed.launcher_env import Address
from strategies.distributed.network import speaks_http, why_unanswered
from strategies.distributed.rendezvous import find_store
from strategies.launch.elastic.node_agent import NodeAgent, NodePlace
from strategies.launch.elastic.place import address_towards, die_with_parent
from strategies.launch.launchers.local import rendezvous_of
from strategies.run_directory.files import RESULT_FILE, keep_result, write_json
from strategies.run_directory.spec import LaunchSpec
from strategies.variables import AGENT_PID, RENDEZVOUS_SECONDS

_JOIN_SECONDS = 600.0  # a cluster's nodes may start minutes apart
_FIRST_REACH_SECONDS = 25.0
_ANSWER_SECONDS = 10.0  # a store that is there answers in milliseconds, on a machine that is busy in seconds
# A node that comes within this time after the least number is there belongs to the same round.
_LAST_CALL_SECONDS = 5
# A node is lost when it has not been heard of for ten seconds: a pause that no busy machine needs.
_HEARTBEAT_SECONDS, _HEARTBEATS_MISSED = 1, 10
_EXIT_BARRIER_SECONDS = 60.0
_SHUTDOWN_SECONDS = 5
_LOOK_SECONDS = 0.2


class Node:
    """One node's place; every `round` is one attempt, and `leave` gives the place up."""

    def __init__(self, spec: LaunchSpec, at: Address) -> None:
        self._spec, self._at = spec, at
        self._place: NodePlace | None = None
        self._has_reached = False

    def round(self) -> None:
        """Meet the other nodes and run this node's ranks to their end; `result.json` says how that was.

        Raises:
            SignalException: this process was asked to end.
        """
        try:
            self._round()
        except RendezvousClosedError:
            self._write("refused", f"the run at {self._at} is over: its other nodes have finished it", status=2)
        except RendezvousTimeoutError:
            least, seconds = self._spec.placement.least_nodes, _patience(_JOIN_SECONDS)
            remedy = "start dsplan run on the others, or lower --nodes"
            self._write(
                "lost", f"fewer than {least} nodes came to {self._at} within {format_seconds(seconds)}; {remedy}"
            )
        except RendezvousConnectionError:
            self._place = None  # whoever serves the rendezvous next knows nothing of this place
            self._write("lost", f"the rendezvous at {self._at} is gone, and with it the node that has this address")
        except DistError:
            # The rendezvous may still be there, but not the node whose store the addresses are exchanged in.
            self.leave()
            self._place = None
            self._write("lost", f"a node was lost while the nodes met at {self._at}")
        except DsplanError as error:
            self._write("refused", str(error), status=error.exit_code)

    def leave(self) -> None:
        """Let the others start without this node at once, instead of when it has been silent for long enough."""
        if self._place is not None:
            self._place.leave()

    def _round(self) -> None:
        if self._place is None:
            self._await()
            self._place = NodePlace(_handler(self._spec, self._at), self._waits_for())
        agent = _agent(self._spec, self._place)
        result = agent.run()
        if agent.conclude(result) == 0:
            self._place.rendezvous.shutdown()  # nodes that come late learn that the run is over

    def _await(self) -> None:
        """Wait until the rendezvous answers; long only where it has answered before.

        Raises:
            DsplanError: it does not; what is there instead, and what to do.
        """
        patience = _patience(_JOIN_SECONDS if self._has_reached else _FIRST_REACH_SECONDS)
        if self._has_reached:
            waits = f"waiting up to {format_seconds(patience)} for it"
            notice(f"the rendezvous at {self._at} is gone; {waits}", stream="stdout")
        deadline = time.monotonic() + patience
        while why := _unreached(self._at):
            if time.monotonic() > deadline:
                gone = f"the rendezvous at {self._at} was there and is gone: " if self._has_reached else ""
                raise DsplanError(f"{gone}{why} (looked for {format_seconds(patience)})")
            time.sleep(_LOOK_SECONDS)
        self._has_reached = True

    def _waits_for(self) -> str:
        placement, patience = self._spec.placement, format_seconds(_patience(_JOIN_SECONDS))
        return f"of at least {placement.least_nodes} nodes at {self._at}; waiting up to {patience} for the others"

    def _write(self, kind: str, reason: str, *, status: int = 1) -> None:
        print(f"error: {reason}", flush=True)
        reported = {"failures": {}, "kind": kind, "reason": reason, "status": status}
        write_json(self._spec.directory / RESULT_FILE, reported)


def serve(spec: LaunchSpec) -> int:
    """Run a round for every line on standard input, until there are no more."""
    at = rendezvous_of(spec)
    assert at is not None, "a node alone meets nobody"
    # Every round has a store of its own at its rank 0: what the ranks of a round left must not be read in the next.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    node = Node(spec, at)
    try:
        for _ in _lines_of_its_own():
            node.round()
    except SignalException as ending:
        return 128 + int(ending.sigval)
    finally:
        node.leave()
    return 0


def _unreached(at: Address) -> str | None:
    """Return why this node does not reach a store at an address yet, and what to do; None where it does.

    Raises:
        DsplanError: another program is there, for which nobody needs to wait.
    """
    try:
        why = why_unanswered(at.host, at.port)
    except OSError as problem:
        return f"there is no host {at.host!r} ({problem.strerror}); give --rendezvous an address that every node knows"
    if why == os.strerror(errno.ECONNREFUSED):
        return f"nothing listens at the rendezvous {at}; start dsplan run first on the node that has this address"
    if why:
        return f"the rendezvous {at} cannot be reached ({why}); check the address, and that no firewall is between"
    if find_store(at, _ANSWER_SECONDS) is not None:
        return None
    is_web = speaks_http(at.host, at.port)
    what = "something that never answers" if is_web is None else "a web server" if is_web else "another program"
    remedy = "give --rendezvous a free port, the same on every node"
    raise DsplanError(f"at the rendezvous {at} is {what} and no run of dsplan; {remedy}")


def _lines_of_its_own() -> TextIO:
    """Take standard input, which the ranks then do not have."""
    lines = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return lines


def _patience(seconds: float) -> float:
    try:
        return float(os.environ.get(RENDEZVOUS_SECONDS) or seconds)
    except ValueError:
        return seconds  # the ranks, which read it too, refuse it with a line of their own


def _handler(spec: LaunchSpec, at: Address) -> DynamicRendezvousHandler:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=str(at),
        # The same on every node and in every attempt; two runs that were given one port by mistake stay apart.
        run_id=f"dsplan-{Path(spec.script).name}",
        min_nodes=spec.placement.least_nodes,
        max_nodes=spec.placement.most_nodes,
        # What a host calls itself often leads other hosts to their own loopback; this address reaches the rendezvous.
        local_addr=address_towards(at.host) or None,
        is_host=False,
        join_timeout=int(_patience(_JOIN_SECONDS)),
        last_call_timeout=_LAST_CALL_SECONDS,
        keep_alive_interval=_HEARTBEAT_SECONDS,
        keep_alive_max_attempt=_HEARTBEATS_MISSED,
    )
    return cast("DynamicRendezvousHandler", get_rendezvous_handler(parameters))


def _agent(spec: LaunchSpec, node_place: NodePlace) -> NodeAgent:
    workers = WorkerSpec(
        role="dsplan",
        local_world_size=spec.processes,
        entrypoint=sys.executable,
        args=("-u", "-m", "strategies.launch.rank_main", str(spec.path)),
        rdzv_handler=node_place,
        max_restarts=0,
        monitor_interval=0.1,
    )
    options: dict[str, object] = {"exit_barrier_timeout": _EXIT_BARRIER_SECONDS}
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
        options["shutdown_timeout"] = _SHUTDOWN_SECONDS
    logs = DefaultLogsSpecs(log_dir=str(spec.directory / "elastic"))
    return NodeAgent(spec, node_place, workers, logs, **options)


# The process between `dsplan run` and the ranks: torch elastic starts them, watches them, and ends them together.


_WATCH_SECONDS = 0.5
"""How often elastic looks at the ranks, which may need the processor that it takes to look."""


def main(spec_path: str, parent: str) -> int:
    """Run the ranks to their end; 0 when all succeeded. `result.json` gets the exit code of every failed rank.

    One of several nodes stays for the attempts that follow, each asked for by a line on standard input.
    """
    die_with_parent(signal.SIGTERM, int(parent))
    spec = LaunchSpec.load(Path(spec_path))
    os.environ[AGENT_PID] = str(os.getpid())
    try:
        return _one_node(spec) if spec.placement.rendezvous is None else serve(spec)
    except SignalException as error:
        return 128 + int(error.sigval)


def _one_node(spec: LaunchSpec) -> int:
    try:
        elastic_launch(_configuration(spec), sys.executable)("-u", "-m", "strategies.launch.rank_main", str(spec.path))
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        keep_result(spec.directory, {"failures": failures})
        return 1
    keep_result(spec.directory, {"failures": {}})
    return 0


def _configuration(spec: LaunchSpec) -> LaunchConfig:
    """Return elastic's configuration: one node, no restarts, a c10d rendezvous on a port the system picks."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        monitor_interval=_WATCH_SECONDS,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(spec.directory / "elastic")),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
