"""Every link by itself: two ranks at a time sum a few numbers and a few megabytes, all pairs of a round together."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError

from dsplan.diagnostics.doctor.finding import Finding, LinkTime
from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from hardware_db.units import format_seconds
from strategies.torch_compat.distributed import PrefixStore, Store, nccl_options

# Ranks exchange values through the store of the rendezvous.
_LOOK_SECONDS = 0.01
_LIMIT_SECONDS = 120.0


class Room:
    """The place of a rank among `ranks` that share a store."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks

    def share(self, topic: str, value: Any) -> list[Any]:
        """Exchange what every rank says to a topic, as JSON and once per topic; return it in rank order.

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
        """Announce that this rank needs the store no more; rank 0, with which the store ends, waits for all of them.

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


_LIMIT = timedelta(seconds=20)
_LARGE_BYTES = 4 << 20
_SMALL_REPEATS, _LARGE_REPEATS = 10, 5
_SLOW_SHARE = 1 / 3
_ENOUGH_TO_COMPARE = 3

Pair = tuple[int, int]


def rounds(members: Sequence[int]) -> list[list[Pair]]:
    """Arrange all pairs of some ranks in rounds in which nobody has two partners: a round-robin tournament."""
    seats: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    played = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        played.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in played if pairs]


def schedule(nodes: Sequence[str], local_ranks: Sequence[int]) -> list[list[Pair]]:
    """Arrange every pair within a node, then every pair of nodes for each local rank; by rank, where it runs."""
    within = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    between = [
        [rank for rank, number in enumerate(local_ranks) if number == local] for local in sorted(set(local_ranks))
    ]
    between = [_one_per_node(members, nodes) for members in between]
    return [*_side_by_side(map(rounds, within)), *_side_by_side(map(rounds, between))]


def _one_per_node(members: Sequence[int], nodes: Sequence[str]) -> list[int]:
    return list({nodes[rank]: rank for rank in reversed(members)}.values())[::-1]


def _side_by_side(groups: Iterable[list[list[Pair]]]) -> list[list[Pair]]:
    """Join the rounds of groups that have no member in common, played at the same time."""
    together = [list(group) for group in groups]
    longest = max(map(len, together), default=0)
    return [[pair for group in together if turn < len(group) for pair in group[turn]] for turn in range(longest)]


def time_links(room: Room, nodes: Sequence[str], local_ranks: Sequence[int], device: torch.device) -> list[LinkTime]:
    """Time every link of the schedule; the result is the same on every rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    links = []
    for turn, pairs in enumerate(schedule(nodes, local_ranks)):
        own = next((pair for pair in pairs if room.rank in pair), None)
        times = None if own is None else _time_pair(room, own, device)
        # Sharing is what ends a round: no pair is timed beside one of the next.
        reported = room.share(f"links-{turn}", times)
        for first, second in pairs:
            latency, bandwidth = reported[first] or (None, None)
            links.append(
                LinkTime(
                    ranks=(first, second),
                    hosts=(nodes[first], nodes[second]),
                    backend=backend,
                    latency_seconds=latency,
                    bandwidth_bytes_per_s=bandwidth,
                )
            )
    return links


def _time_pair(room: Room, pair: Pair, device: torch.device) -> tuple[float, float] | None:
    """Return seconds of a tiny all-reduce (median) and bytes/s of a large one (best), or None if it fails."""
    # A group of its own per pair: one pair that cannot talk says nothing about the others.
    store, own = PrefixStore(f"pair-{pair[0]}-{pair[1]}", room.store), pair.index(room.rank)
    small, large = torch.ones(1, device=device), torch.ones(_LARGE_BYTES // 4, device=device)
    try:
        group: Any = _nccl(store, own) if device.type == "cuda" else dist.ProcessGroupGloo(store, own, 2, _LIMIT)
        latency = statistics.median(_time_sums(small, group, _SMALL_REPEATS))
        quickest = min(_time_sums(large, group, _LARGE_REPEATS))
    except RuntimeError as problem:
        notice(f"rank {room.rank}: ranks {pair[0]} and {pair[1]} cannot sum: {str(problem).splitlines()[0]}")
        return None
    return latency, _LARGE_BYTES / quickest


def _nccl(store: Store, rank: int) -> Any:
    return dist.ProcessGroupNCCL(store, rank, 2, nccl_options(_LIMIT))


def _time_sums(tensor: torch.Tensor, group: Any, repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        group.allreduce([tensor]).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        taken.append(time.perf_counter() - begun)
    return taken[1:]  # the first connects


def link_findings(links: Sequence[LinkTime]) -> list[Finding]:
    """Report links that fail, and links much slower than the others of their kind."""
    silent = [link for link in links if link.bandwidth_bytes_per_s is None]
    findings = [
        Finding.problem("link", f"{link.name} cannot sum over {link.backend} ({link.kind})", _remedy(link))
        for link in silent
    ]
    for kind, group in groupby(sorted(links, key=lambda link: link.kind), key=lambda link: link.kind):
        rates = {link: link.bandwidth_bytes_per_s for link in group if link.bandwidth_bytes_per_s is not None}
        findings += _compare_rates(kind, {link: rate for link, rate in rates.items() if rate is not None})
    return findings


def _compare_rates(kind: str, rates: dict[LinkTime, float]) -> list[Finding]:
    if not rates:
        return []
    usual = statistics.median(rates.values())
    slow = [link for link, rate in rates.items() if rate < _SLOW_SHARE * usual]
    latency = statistics.median(link.latency_seconds or 0.0 for link in rates)
    many = f"{len(rates)} link{'s' * (len(rates) > 1)} {kind}"
    message = f"{many}: {usual / 1e9:.3g} GB/s and {format_seconds(latency)} in the middle"
    median = [Finding(check="link", message=message)]
    if len(rates) < _ENOUGH_TO_COMPARE:
        return median
    return median + [
        Finding.warning(
            "link",
            f"{link.name}: {rates[link] / 1e9:.3g} GB/s where links {kind} usually have {usual / 1e9:.3g}",
            "look for other traffic, a wrong interface or a worn cable; every collective waits for it",
        )
        for link in slow
    ]


def _remedy(link: LinkTime) -> str:
    if link.backend == "nccl":
        return "NCCL_DEBUG=INFO says why; look at NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ACS and /dev/shm"
    return "set GLOO_SOCKET_IFNAME to the interface that joins the nodes, and open its ports between them"
