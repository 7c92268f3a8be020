"""A driver of Ray: it reserves the nodes of one attempt, starts their ranks, watches them and ends with them. No torch.

Run as `python -m strategies.launch.launchers.ray_driver SPEC`. A placement group of a bundle per node, each on a node
of its own, holds one actor with all ranks of that node. Ray's own means say what was lost: an actor whose process or
node is gone raises where it was called, and nodes that are drained are listed. Nothing is started again here, since
another attempt may need another plan: that is the supervisor's to decide, and it starts another driver.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from hardware_db.units import format_seconds
from strategies.launch.grace_period import SIGNAL_SECONDS
from strategies.launch.launchers.ray import node_resources
from strategies.launch.launchers.ray_node import NodeAddress, NodeRanks, NodeStart
from strategies.run_directory.claim import claimed_kind
from strategies.run_directory.files import keep_result
from strategies.run_directory.spec import SAVING, STOPPED, LaunchSpec
from strategies.variables import RENDEZVOUS_SECONDS

_NAMESPACE = "dsplan"
_CONNECT_SECONDS = 120.0  # a cluster answers in a second, a Ray of this machine starts in ten or on a busy one in sixty
_NODES_SECONDS = 600.0  # an autoscaler's nodes take minutes, as those of the local launcher may
_TELL_SECONDS = 3.0  # a cluster with room answers sooner
_FEWER_SECONDS = 5.0  # before an elastic run takes fewer nodes than it could have
_ACTOR_SECONDS = 120.0  # a Ray process on a busy machine starts within half a minute
_LOOK_SECONDS = 0.25
_NODES_LOOK_SECONDS = 2.0
_LAST_WORDS_SECONDS = 2.0  # for the ranks of other nodes to say why they end, after one has failed
_STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL; the keeper above kills after 7
_END_SECONDS = 10.0
# Ray's own, in which objects lie that none of this writes; the least that it takes is 75 MiB.
_OBJECT_STORE_BYTES = 100 * 2**20


class Stopped(Exception):
    """Raised where this process was asked to end."""


class Requests:
    """Signals to this process, to be handed on where the ranks are watched."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self.stop = False
        signal.signal(signal.SIGUSR1, lambda number, frame: self._numbers.append(number))
        # After `ray.init`, which has a handler of its own.
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self.stop = True

    def take(self) -> set[int]:
        """Return the signals that have come since the last call."""
        numbers, self._numbers = self._numbers, []
        return set(numbers)

    def check(self) -> None:
        """Raise where this process is to end.

        Raises:
            Stopped: it is.
        """
        if self.stop:
            raise Stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Resources that each node of a run has to offer, in Ray's words."""

    resources: Mapping[str, float]

    def __str__(self) -> str:
        return " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())

    def fits(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node of `ray.nodes()` is there and has as much, free or not."""
        total = node.get("Resources") or {}
        return bool(node["Alive"]) and all(total.get(name, 0.0) >= amount for name, amount in self.resources.items())


def connect(spec: LaunchSpec) -> None:
    """Join the cluster, or start a Ray of this machine that ends with this process.

    Raises:
        DsplanError: Ray says why not.
    """
    address = spec.placement.ray_address
    path = os.environ.get("PYTHONPATH")
    settings: dict[str, Any] = {"namespace": _NAMESPACE}
    if path:
        settings["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    if address is None:
        settings |= {"num_cpus": _local_cpus(spec), "include_dashboard": False}
        settings["object_store_memory"] = _OBJECT_STORE_BYTES
    giving_up = threading.Timer(_CONNECT_SECONDS, _give_up, (spec,))
    giving_up.daemon = True
    giving_up.start()
    try:
        ray.init(address=address or "local", **settings)
    except Exception as error:  # whose kinds are many, plain ones among them
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if address is None:
            raise DsplanError(f"Ray does not start on this machine: {first}") from None
        remedy = "start dsplan run on a node of it, or by `ray job submit`"
        raise DsplanError(f"the Ray cluster at --ray-address {address} cannot be joined: {first}; {remedy}") from None
    finally:
        giving_up.cancel()


def _give_up(spec: LaunchSpec) -> None:
    """End this process, which Ray would have try for many minutes to join what is no cluster."""
    where = "this machine" if spec.placement.ray_address is None else f"--ray-address {spec.placement.ray_address}"
    refused = DsplanError(f"Ray at {where} has not answered in {_CONNECT_SECONDS:g} s; see what listens there")
    print(f"error: {refused}", flush=True)
    keep_result(spec.directory, {"failures": {}, "kind": "refused", "reason": str(refused)})
    os._exit(refused.exit_code)


def _local_cpus(spec: LaunchSpec) -> int:
    return int(max(node_resources(spec.placement, spec.processes).get("CPU", 0), 1))


def bundle_of(spec: LaunchSpec, nodes: Iterable[Mapping[str, Any]]) -> Bundle:
    """Return the bundle of a node: a CPU per rank, and a GPU where the cluster has any and they are not hidden.

    Raises:
        DsplanError: the options leave nothing of it.
    """
    resources = node_resources(spec.placement, spec.processes)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(
        (node.get("Resources") or {}).get("GPU") for node in nodes if node["Alive"]
    ):
        resources = {"GPU": float(spec.processes), **resources}
    if not resources:
        raise DsplanError("--launcher-option CPU=0 leaves nothing to reserve on a node; name a resource that it has")
    return Bundle(resources=resources)


def reserve(spec: LaunchSpec, bundle: Bundle, requests: Requests) -> PlacementGroup:
    """Reserve as many nodes as the run takes, waiting for them as long as nodes wait for each other.

    Raises:
        DsplanError: the cluster is too small, or busy for too long.
        Stopped: this process was asked to end.
    """
    patience = float(os.environ.get(RENDEZVOUS_SECONDS) or _NODES_SECONDS)
    began = time.monotonic()
    is_told = False
    for count in _sizes(spec, bundle):
        strategy = "STRICT_SPREAD" if count > 1 else "PACK"
        group = placement_group([dict(bundle.resources)] * count, strategy=strategy)
        tried = time.monotonic()
        while not group.wait(1):
            requests.check()
            now = time.monotonic()
            if now - began > patience:
                remedy = "add nodes or wait for them, and --resume; or lower --nodes or --nproc"
                raise DsplanError(f"{_shortage(spec, bundle)} (waited {format_seconds(patience)}); {remedy}")
            if now - began > _TELL_SECONDS and not is_told:
                is_told = True
                notice(f"{_shortage(spec, bundle)}; waiting up to {format_seconds(patience)} for more", stream="stdout")
            if spec.placement.is_elastic and now - tried > _FEWER_SECONDS:
                break
        else:
            return group
        remove_placement_group(group)
    raise AssertionError("sizes are tried until the time is over")


def _sizes(spec: LaunchSpec, bundle: Bundle) -> Iterator[int]:
    """Yield the numbers of nodes to try, from the most that there are on, again and again."""
    least, most = spec.placement.least_nodes, spec.placement.most_nodes
    largest = min(most, max(least, sum(map(bundle.fits, ray.nodes()))))
    return cycle(range(largest, least - 1, -1))


def _shortage(spec: LaunchSpec, bundle: Bundle) -> str:
    """Return what the cluster lacks, or that others use it."""
    fitting, needed = sum(map(bundle.fits, ray.nodes())), spec.placement.least_nodes
    where = "this machine" if spec.placement.ray_address is None else f"the Ray cluster at {spec.placement.ray_address}"
    if fitting < needed:
        return f"{where} has {fitting} of the {needed} nodes with {bundle} each that the run needs"
    return f"{where} has {needed} nodes with {bundle} each that the run needs, and not all are free"


def _alive() -> set[str]:
    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


class Attempt:
    """The ranks of one attempt on the nodes that were reserved: `run` it, then `result` says how it ended."""

    def __init__(self, spec: LaunchSpec, bundle: Bundle, group: PlacementGroup, requests: Requests) -> None:
        self._spec, self._bundle, self._group, self._requests = spec, bundle, group, requests
        self._codes: dict[int, int] = {}
        self._verdict: dict[str, object] = {}
        self._actors: list[Any] = []
        self._nodes: list[NodeAddress] = []
        self._runs: dict[Any, int] = {}
        self._elders = _alive()
        self._looked = time.monotonic()
        self._regrouping: float | None = None
        self._why = ""
        self._signalled = float("-inf")

    @property
    def result(self) -> dict[str, object]:
        """The content of `result.json`; with a kind where the ranks cannot know why they ended."""
        failures = {rank: code for rank, code in self._codes.items() if code}
        verdict = self._verdict
        if not verdict and failures and self._regrouping is not None:
            verdict = {"kind": "regrouped", "reason": self._why}
        return {"failures": failures, **verdict}

    def run(self) -> int:
        """Start the ranks and watch them to their end; return 0 where all have ended with 0.

        Raises:
            DsplanError: a node does not see the run directory, or dsplan.
            Stopped: this process was asked to end.
        """
        try:
            self._start()
            while self._runs and not self._verdict and all(code in (0, STOPPED) for code in self._codes.values()):
                self._watch()
        finally:
            self._end()
        return 0 if not self._verdict and all(code == 0 for code in self._codes.values()) else 1

    def _start(self) -> None:
        count = self._group.bundle_count
        for index in range(count):
            actor = ray.remote(NodeRanks).options(
                name=f"{self._spec.run_id}-{index}",
                num_cpus=self._bundle.resources.get("CPU", 0),
                num_gpus=self._bundle.resources.get("GPU", 0),
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            )
            self._actors.append(actor.remote())
        references = [actor.address.remote() for actor in self._actors]
        self._nodes = [self._answer(reference) for reference in references]
        for index, actor in enumerate(self._actors):
            start = NodeStart(
                spec_path=str(self._spec.path),
                first_rank=index * self._spec.processes,
                world_size=count * self._spec.processes,
                meeting_point=self._nodes[0],
                has_gpus="GPU" in self._bundle.resources,
                directory=str(Path.cwd()),
                variables=dict(os.environ),
            )
            self._runs[actor.run.remote(start)] = index

    def _answer(self, reference: Any) -> NodeAddress:
        """Wait for an actor to say where it is."""
        deadline = time.monotonic() + _ACTOR_SECONDS
        while True:
            self._requests.check()
            try:
                address: NodeAddress = ray.get(reference, timeout=1)
            except GetTimeoutError:
                if time.monotonic() > deadline:
                    raise DsplanError(f"a node of the Ray cluster starts no process in {_ACTOR_SECONDS:g} s") from None
                continue
            except RayError as error:
                if "ModuleNotFoundError" in str(error):
                    raise DsplanError(
                        "a node of the Ray cluster cannot import dsplan; install it there, in the environment that"
                        " Ray runs in"
                    ) from None
                raise
            return address

    def _watch(self) -> None:
        """Wait a moment for ranks to end, and hand signals on."""
        self._requests.check()
        for number in self._requests.take():
            self._signal(number)
        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_LOOK_SECONDS)
        for reference in ended:
            self._take(reference)
        if self._runs and not self._verdict:
            self._look_at_nodes()

    def _take(self, reference: Any) -> None:
        """Take what a node says of its ranks' end, or what Ray says of the node's."""
        index = self._runs.pop(reference)
        try:
            self._codes |= ray.get(reference)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, DsplanError) else None
            if cause is None:
                raise
            raise DsplanError(str(cause)) from None
        except (RayActorError, OutOfMemoryError) as error:
            self._verdict = self._verdict_of(self._nodes[index], error)

    def _verdict_of(self, node: NodeAddress, error: RayError) -> dict[str, object]:
        if isinstance(error, OutOfMemoryError):
            reason = f"Ray has ended the ranks on {node.host}, whose memory was all but used"
            return {"kind": "out_of_memory", "reason": reason, "node": node.host}
        if node.node_id not in _alive():
            return {"kind": "lost", "reason": f"Ray has lost the node {node.host} ({node.address})", "node": node.host}
        return {"kind": "killed", "reason": f"Ray's process on {node.host} was killed", "node": node.host}

    def _look_at_nodes(self) -> None:
        """Have all ranks save and stop where a node is about to go, or nodes have come that the run can take."""
        now = time.monotonic()
        if self._regrouping is not None:
            if now - self._regrouping > self._spec.supervision.grace_seconds:
                reason = f"{self._why}, and the ranks could not save in time"
                self._verdict |= {"kind": "regrouped", "reason": reason}
            elif now - self._signalled >= SIGNAL_SECONDS:
                self._signalled = now
                self._signal(signal.SIGUSR1)
            return
        if now - self._looked < _NODES_LOOK_SECONDS:
            return
        self._looked = now
        self._why = self._why_regroup()
        if self._why and claimed_kind(self._spec.directory) in SAVING:
            self._regrouping = now
            notice(f"{self._why}; the ranks save and start again", stream="stdout")

    def _why_regroup(self) -> str:
        """Return why the attempt should be started again on other nodes; empty where it should not."""
        # Of Ray's private parts, as Ray Train's own watcher reads it (2.60): no public call tells of drained nodes.
        drained = ray._private.state.state.get_draining_nodes()
        for node in self._nodes:
            if node.node_id in drained:
                return f"Ray drains the node {node.host} ({node.address})"
        if len(self._actors) >= self._spec.placement.most_nodes:
            return ""
        came = [node for node in ray.nodes() if self._bundle.fits(node) and node["NodeID"] not in self._elders]
        return f"{len(came)} node{'s' * (len(came) > 1)} came" if came else ""

    def _signal(self, number: int) -> None:
        for index in self._runs.values():
            self._actors[index].signal.remote(number)

    def _end(self) -> None:
        """End the ranks that are left, and the actors; return when none of them runs."""
        seconds = _LAST_WORDS_SECONDS
        if self._requests.stop:
            seconds = _STOP_SECONDS
            self._signal(signal.SIGTERM)
        ends = [self._actors[index].end.remote(seconds) for index in self._runs.values()]
        ended, _ = ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS) if ends else ([], [])
        for reference in ended:
            try:
                self._codes |= ray.get(reference)
            except RayError:
                continue  # its process is gone, and its ranks with it
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def end_left(spec: LaunchSpec) -> None:
    """End actors of an earlier attempt, whose driver was killed: their ranks would write where the next do."""
    for index in range(spec.placement.most_nodes):
        try:
            ray.kill(ray.get_actor(f"{spec.run_id}-{index}", namespace=_NAMESPACE))
        except ValueError:
            continue


def main(spec_path: str) -> int:
    """Run the ranks of one attempt to their end; `result.json` says how that was."""
    spec = LaunchSpec.load(Path(spec_path))
    result: dict[str, object] = {"failures": {}}
    try:
        connect(spec)
        requests = Requests()
        end_left(spec)
        bundle = bundle_of(spec, ray.nodes())
        attempt = Attempt(spec, bundle, reserve(spec, bundle, requests), requests)
        status = attempt.run()
        result = attempt.result
    except Stopped:
        status = 128 + signal.SIGTERM
    except DsplanError as error:
        print(f"error: {error}", flush=True)
        status, result = error.exit_code, {"failures": {}, "kind": "refused", "reason": str(error)}
    except RayError as error:
        first = str(error).strip().splitlines()[0]
        status, result = 1, {"failures": {}, "kind": "lost", "reason": f"Ray has lost the attempt: {first}"}
    keep_result(spec.directory, result)
    ray.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
