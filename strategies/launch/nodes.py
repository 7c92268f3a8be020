"""A node joins the others of its run at their rendezvous, for one round."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import cast

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from hardware_db.errors import DsplanError
from strategies.launch.local import rendezvous_of
from strategies.launch.node_agent import NodeAgent, OneRound
from strategies.launch.orders import Orders
from strategies.launch.place import address_towards
from strategies.launch.rendezvous_store import answers
from strategies.launch.spec import RESULT_FILE, LaunchSpec, write_json
from strategies.process_variables import Address

SECONDS = "DSPLAN_RENDEZVOUS_SECONDS"
JOIN_SECONDS = 600.0
"""How long nodes wait for the others; a cluster's may start minutes apart."""
_FIRST_REACH_SECONDS = 25.0
# A node that comes within this time after the least number is there belongs to the same round.
_LAST_CALL_SECONDS = 5
# A node is lost when it has not been heard of for ten seconds: a pause that no busy machine needs.
_HEARTBEAT_SECONDS, _HEARTBEATS_MISSED = 1, 10
_EXIT_BARRIER_SECONDS = 60.0
_SHUTDOWN_SECONDS = 5
_LOOK_SECONDS = 0.2


def run_round(spec: LaunchSpec) -> int:
    """Meet the other nodes, run this node's ranks to their end, and leave; 0 when all succeeded.

    Raises:
        DsplanError: the rendezvous cannot be reached, too few nodes come, or the run is over.
        SignalException: this process was asked to end.
    """
    at = rendezvous_of(spec)
    assert at is not None, "a node alone meets nobody"
    _await(at, spec.directory)
    # Every round has a store of its own at its rank 0: what the ranks of a round left must not be read in the next.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    one_round = OneRound(_handler(spec, at))
    agent = _agent(spec, one_round)
    try:
        result = agent.run()
    except RendezvousClosedError:
        raise DsplanError(f"the run at {at} is over: its other nodes have finished it") from None
    except (RendezvousTimeoutError, RendezvousConnectionError) as problem:
        return _nobody(spec, at, problem)
    except SignalException:
        one_round.leave()
        raise
    status = agent.conclude(result)
    if status == 0:
        one_round.rendezvous.shutdown()  # late nodes are told that the run is over
    else:
        one_round.leave()
    return status


def _await(at: Address, directory: Path) -> None:
    """Wait until the rendezvous answers; long only where it has answered in an earlier attempt of this run."""
    orders = Orders.load(directory)
    patience = _patience(JOIN_SECONDS if orders is not None and orders.attempt > 0 else _FIRST_REACH_SECONDS)
    deadline = time.monotonic() + patience
    while not answers(at):
        if time.monotonic() > deadline:
            raise DsplanError(
                f"nothing answers at the rendezvous {at} within {patience:g} s; start dsplan run on the node that has"
                " this address, and check that no firewall is between"
            )
        time.sleep(_LOOK_SECONDS)


def _patience(seconds: float) -> float:
    try:
        return float(os.environ.get(SECONDS) or seconds)
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
        # What a host calls itself often leads other hosts to their own loopback; this address has been reached from.
        local_addr=address_towards(at.host) or None,
        is_host=False,
        join_timeout=int(_patience(JOIN_SECONDS)),
        last_call_timeout=_LAST_CALL_SECONDS,
        keep_alive_interval=_HEARTBEAT_SECONDS,
        keep_alive_max_attempt=_HEARTBEATS_MISSED,
    )
    return cast("DynamicRendezvousHandler", get_rendezvous_handler(parameters))


def _agent(spec: LaunchSpec, one_round: OneRound) -> NodeAgent:
    workers = WorkerSpec(
        role="dsplan",
        local_world_size=spec.processes,
        entrypoint=sys.executable,
        args=("-u", "-m", "strategies.launch.rank_main", str(spec.path)),
        rdzv_handler=one_round,
        max_restarts=0,
        monitor_interval=0.1,
    )
    options: dict[str, object] = {"exit_barrier_timeout": _EXIT_BARRIER_SECONDS}
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
        options["shutdown_timeout"] = _SHUTDOWN_SECONDS
    logs = DefaultLogsSpecs(log_dir=str(spec.directory / "elastic"))
    return NodeAgent(spec, one_round, workers, logs, **options)


def _nobody(spec: LaunchSpec, at: Address, problem: Exception) -> int:
    """The round did not begin: too few nodes came, or the node that has the rendezvous is gone."""
    least = spec.placement.least_nodes
    reason = (
        f"fewer than {least} nodes came to {at}; start dsplan run on the others, or lower --nodes"
        if isinstance(problem, RendezvousTimeoutError)
        else f"the rendezvous at {at} is gone, and with it the node that has this address"
    )
    print(json.dumps(reason), flush=True)
    write_json(spec.directory / RESULT_FILE, {"failures": {}, "kind": "lost", "reason": reason})
    return 1
