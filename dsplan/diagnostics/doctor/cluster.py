"""The machines of a job together: versions, reachability, clocks, shared directories, links. Every rank calls it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsplan.diagnostics.doctor.finding import (
    Diagnosis,
    Finding,
    Level,
    LinkTime,
    find_unseen,
    merge_findings,
    sorted_findings,
    write_tokens,
)
from dsplan.diagnostics.doctor.links import Room, link_findings, time_links
from hardware_db.probe.machine import Machine
from hardware_db.units import format_seconds
from strategies.distributed.environment import device_name, meet_before_script
from strategies.distributed.launcher_env import ProcessVariables
from strategies.launch.elastic.place import address_towards, choose_interface

_EXCHANGES = 7
_LIMIT_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Greeting:
    """The result of a call."""

    ahead_seconds: float = 0.0
    """The other clock less this one."""
    round_trip_seconds: float = 0.0
    """The quickest answer."""
    problem: str = ""
    """Why there was no answer; empty where there was."""


class Greeter:
    """A port that tells the time until it is closed; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self._thread = threading.Thread(target=self._serve, name="doctor-greeter", daemon=True)

    @property
    def port(self) -> int:
        """The port, which the system chose."""
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Greeter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_report_time, args=(caller,), name="doctor-answer", daemon=True).start()


def _report_time(caller: socket.socket) -> None:
    with caller:
        caller.settimeout(_LIMIT_SECONDS)
        try:
            while caller.recv(1):
                caller.sendall(struct.pack("!d", time.time()))
        except OSError:
            return


def greet(host: str, port: int) -> Greeting:
    """Call a greeter, and read its clock as Cristian's algorithm does: against the middle of the quickest exchange."""
    try:
        with socket.create_connection((host, port), timeout=_LIMIT_SECONDS) as called:
            called.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            exchanges = [_exchange(called) for _ in range(_EXCHANGES)]
    except OSError as problem:
        return Greeting(problem=problem.strerror or str(problem) or type(problem).__name__)
    round_trip, ahead = min(exchanges)
    return Greeting(ahead_seconds=ahead, round_trip_seconds=round_trip)


def _exchange(called: socket.socket) -> tuple[float, float]:
    sent = time.time()
    called.sendall(b"?")
    answer = b""
    while len(answer) < 8:
        part = called.recv(8 - len(answer))
        if not part:
            raise ConnectionResetError(0, "the connection was closed")
        answer += part
    heard = time.time()
    return heard - sent, float(struct.unpack("!d", answer)[0]) - (sent + heard) / 2


# torch elastic's c10d rendezvous calls a node dead whose heartbeat is 15 s old by another node's clock.
_SKEW_PROBLEM_SECONDS, _SKEW_WARNING_SECONDS = 5.0, 0.5
_SHARE = (
    "checkpoints of several nodes need a directory that all of them see (--checkpoint-dir), and the script must be on"
    " every node"
)
_MUST_AGREE = ("torch", "nccl", "deepspeed", "dsplan", "torch built for")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A rank as all others see it: its node's name and address, and its greeter's port."""

    node: str
    address: str
    port: int
    local_rank: int
    versions: Mapping[str, str]


def examine_cluster(
    process: ProcessVariables, machine: Machine, findings: Sequence[Finding], directories: Sequence[Path]
) -> Diagnosis:
    """Examine the ranks together, and add the `findings` of every node by itself; the same on every rank.

    `directories` have to be shared by all nodes.

    Raises:
        DsplanError: the ranks cannot meet, or one is lost on the way.
    """
    assert process.meeting_point is not None, "a process alone is examined by itself"
    if process.local_world_size < process.world_size:
        choose_interface(process.meeting_point.host, os.environ)
    store = meet_before_script()
    assert store is not None, "there are several ranks"
    room = Room(store, process.rank, process.world_size)
    with Greeter() as greeter:
        members = _introduce(room, process, greeter.port, machine)
        leaders = _leaders(members)
        is_leader = process.rank in leaders
        reported = room.share("findings", [finding.to_dict() for finding in findings] if is_leader else [])
        local = [
            replace(Finding.from_dict(raw), hosts=(members[rank].node,))
            for rank, all_ in enumerate(reported)
            for raw in all_
        ]
        reached = _check_reach(room, members, leaders)
    together = [*reached, *_compare_versions(members, leaders)]
    together += _check_directories(room, members, leaders, directories)
    links = [] if any(finding.level == "problem" for finding in reached) else _time_links(room, process, members)
    together += link_findings(links)
    nodes = tuple(members[rank].node for rank in leaders)
    diagnosis = Diagnosis(
        hosts=nodes,
        ranks=process.world_size,
        findings=sorted_findings([*merge_findings(local), *together]),
        links=tuple(links),
    )
    room.leave()
    return diagnosis


def _introduce(room: Room, process: ProcessVariables, port: int, machine: Machine) -> list[Member]:
    """Let all ranks know each other; a node has its name, and its address too where several have one name."""
    assert process.meeting_point is not None
    software = machine.software
    versions = {"python": software.python, **dict(software.packages)}
    versions |= {"driver": software.driver or "", "torch built for": software.torch_cuda or ""}
    versions["GPUs"] = ", ".join(f"{n} x {name}" for name, n in Counter(g.name for g in machine.gpus).items()) or "none"
    own = {
        "host": socket.gethostname(),
        "address": address_towards(process.meeting_point.host),
        "port": port,
        "local_rank": process.local_rank,
        "versions": versions,
    }
    reported = room.share("introduction", own)
    addresses = {(report["host"], report["address"]) for report in reported}
    alike = Counter(host for host, _ in addresses)
    return [
        Member(
            node=report["host"] if alike[report["host"]] == 1 else f"{report['host']}/{report['address']}",
            address=report["address"],
            port=report["port"],
            local_rank=report["local_rank"],
            versions=report["versions"],
        )
        for report in reported
    ]


def _leaders(members: Sequence[Member]) -> list[int]:
    """Return the first rank of every node."""
    first: dict[str, int] = {}
    for rank, member in enumerate(members):
        first.setdefault(member.node, rank)
    return list(first.values())


def _check_reach(room: Room, members: Sequence[Member], leaders: Sequence[int]) -> list[Finding]:
    """Let every node call every other, for those that do not answer and clocks that are off."""
    others = [rank for rank in leaders if room.rank in leaders and rank != room.rank]
    greetings = {rank: greet(members[rank].address, members[rank].port) for rank in others}
    own = [[rank, greeting.problem, greeting.ahead_seconds] for rank, greeting in greetings.items()]
    findings, clocks = [], {}
    for caller, calls in enumerate(room.share("greetings", own)):
        for called, problem, ahead in calls:
            if problem:
                here, there = members[caller], members[called]
                where = f"{there.node} at {there.address}:{there.port}"
                message = f"{here.node} cannot connect to {where} ({problem})"
                remedy = "open all ports between the nodes, or give MASTER_ADDR on a network that joins them"
                findings.append(Finding.problem("reach", message, remedy, (here.node,)))
            elif caller == leaders[0]:
                clocks[members[called].node] = float(ahead)
    if len(leaders) > 1 and not findings:
        findings.append(Finding(check="reach", message=f"each of {len(leaders)} nodes reaches every other"))
    return [*_compare_clocks(members[leaders[0]].node, clocks), *findings]


def _compare_clocks(first: str, ahead: Mapping[str, float]) -> list[Finding]:
    off = {node: seconds for node, seconds in ahead.items() if abs(seconds) >= _SKEW_WARNING_SECONDS}
    if ahead and not off:
        worst = format_seconds(max(map(abs, ahead.values())))
        return [Finding(check="clock", message=f"clocks of the nodes agree within {worst}")]
    return [
        Finding(
            level="problem" if abs(seconds) >= _SKEW_PROBLEM_SECONDS else "warning",
            check="clock",
            message=f"the clock of {node} is {format_seconds(abs(seconds))}"
            f" {'ahead of' if seconds > 0 else 'behind'} {first}'s",
            remedy="run chronyd or systemd-timesyncd on every node: rendezvous compares clocks",
            hosts=(node,),
        )
        for node, seconds in off.items()
    ]


def _compare_versions(members: Sequence[Member], leaders: Sequence[int]) -> list[Finding]:
    names = list(dict.fromkeys(name for rank in leaders for name in members[rank].versions))
    findings = []
    for name in names:
        by_version: dict[str, list[str]] = {}
        for rank in leaders:
            by_version.setdefault(members[rank].versions.get(name) or "none", []).append(members[rank].node)
        if len(by_version) > 1:
            differing = ", ".join(f"{version} on {' '.join(nodes)}" for version, nodes in by_version.items())
            level: Level = "problem" if name in _MUST_AGREE else "warning"
            remedy = "install one version everywhere" if name != "GPUs" else "the slowest GPU sets the pace of all"
            findings.append(Finding(level=level, check="versions", message=f"{name}: {differing}", remedy=remedy))
    if not findings and len(leaders) > 1:
        findings.append(Finding(check="versions", message=f"the same on all {len(leaders)} nodes"))
    return findings


def _check_directories(
    room: Room, members: Sequence[Member], leaders: Sequence[int], directories: Sequence[Path]
) -> list[Finding]:
    """Look whether every node sees the working directory and the directories that have to be shared."""
    if len(leaders) == 1:
        return []
    looked_at = list(dict.fromkeys([Path.cwd(), *directories]))
    with ExitStack() as stack:
        written = stack.enter_context(write_tokens(looked_at)) if room.rank == 0 else {}
        written = room.share("tokens", written)[0]
        missed = room.share("unseen", find_unseen(written) if room.rank in leaders else [])
    findings = []
    required = {str(directory) for directory in directories}
    for directory, name in written.items():
        nodes = tuple(members[rank].node for rank in leaders if directory in missed[rank])
        if name and not nodes:
            findings.append(Finding(check="shared", message=f"{directory} is shared by all nodes"))
            continue
        lacking = f"is not shared with {' '.join(nodes)}" if name else f"cannot be written by {members[0].node}"
        report = Finding.problem if directory in required else Finding.warning
        findings.append(report("shared", f"{directory} {lacking}", _SHARE, nodes))
    return findings


def _time_links(room: Room, process: ProcessVariables, members: Sequence[Member]) -> list[LinkTime]:
    device = torch.device(device_name(process.local_rank)[0])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return time_links(room, [member.node for member in members], [member.local_rank for member in members], device)
