"""Findings of ranks together; nodes are threads over one store. tests/strategies/distributed has ranks that are
processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from dsplan.diagnostics.doctor import cluster
from dsplan.diagnostics.doctor import links as room
from dsplan.diagnostics.doctor.cluster import Greeter, greet
from dsplan.diagnostics.doctor.finding import LinkTime, find_unseen, write_tokens
from dsplan.diagnostics.doctor.links import Room, link_findings, rounds, schedule
from hardware_db.errors import DsplanError


def member(node: str, **versions: str) -> cluster.Member:
    return cluster.Member(node=node, address="127.0.0.1", port=1, local_rank=0, versions=versions)


def together(parts: Sequence[Callable[[Room], Any]]) -> list[Any]:
    """Each part in a thread of its own, as one rank."""
    store = HashStore()
    with ThreadPoolExecutor(len(parts)) as threads:
        started = [threads.submit(part, Room(store, rank, len(parts))) for rank, part in enumerate(parts)]
        return [future.result(30) for future in started]


@pytest.mark.parametrize("members", range(1, 10))
def test_a_tournament_has_every_pair_once_and_nobody_twice_in_a_round(members: int) -> None:
    played = rounds(range(members))
    for pairs in played:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    everyone = [pair for pairs in played for pair in pairs]
    assert sorted(everyone) == [(low, high) for low in range(members) for high in range(low + 1, members)]


def test_links_are_those_within_nodes_and_those_between_equal_local_ranks() -> None:
    nodes, local_ranks = ["a", "a", "b", "b", "c"], [0, 1, 0, 1, 0]
    pairs = [pair for pairs in schedule(nodes, local_ranks) for pair in pairs]
    assert sorted(pairs) == [(0, 1), (0, 2), (0, 4), (1, 3), (2, 3), (2, 4)]
    for together_ in schedule(nodes, local_ranks):
        assert len({rank for pair in together_ for rank in pair}) == 2 * len(together_)


def link(first: int, second: int, rate: float | None) -> LinkTime:
    return LinkTime(
        ranks=(first, second), hosts=("a", "b"), backend="gloo", latency_seconds=1e-4, bandwidth_bytes_per_s=rate
    )


def test_a_link_far_below_the_others_and_one_that_is_silent_are_named() -> None:
    links = [link(0, 1, 1e9), link(0, 2, 0.9e9), link(1, 2, 0.2e9), link(2, 3, None)]
    silent, usual, slow = link_findings(links)
    assert (silent.level, usual.level, slow.level) == ("problem", "ok", "warning")
    assert silent.message == "ranks 2 and 3 (a and b) cannot sum over gloo (between nodes)"
    assert slow.message == "ranks 1 and 2 (a and b): 0.2 GB/s where links between nodes usually have 0.9"
    assert [finding.level for finding in link_findings(links[1:3])] == ["ok"]  # of two nobody knows which is usual


def test_a_greeter_tells_that_it_is_reached_and_what_time_it_is() -> None:
    with Greeter() as greeter:
        greeting = greet("127.0.0.1", greeter.port)
        port = greeter.port
    assert greeting.problem == ""
    assert abs(greeting.ahead_seconds) <= greeting.round_trip_seconds
    assert greet("127.0.0.1", port).problem == "Connection refused"


def test_clocks_that_are_off_are_named_with_their_direction() -> None:
    (behind,) = cluster._compare_clocks("a", {"b": -0.7, "c": 0.1})
    assert (behind.level, behind.message) == ("warning", "the clock of b is 700 ms behind a's")
    (ahead,) = cluster._compare_clocks("a", {"b": 6.0})
    assert (ahead.level, ahead.message) == ("problem", "the clock of b is 6 s ahead of a's")
    (fine,) = cluster._compare_clocks("a", {"b": 0.002})
    assert fine.message == "clocks of the nodes agree within 2 ms"


def test_versions_that_differ_are_named_with_their_nodes() -> None:
    members = [member("a", torch="2.6.0", python="3.12.1"), member("b", torch="2.6.0", python="3.11.7")]
    (python,) = cluster._compare_versions(members, [0, 1])
    assert (python.level, python.message) == ("warning", "python: 3.12.1 on a, 3.11.7 on b")
    (torch,) = cluster._compare_versions([*members[:1], member("c", torch="2.11.0", python="3.12.1")], [0, 1])
    assert (torch.level, torch.message) == ("problem", "torch: 2.6.0 on a, 2.11.0 on c")
    (same,) = cluster._compare_versions(members[:1] * 2, [0, 1])
    assert same.level == "ok"


def test_a_directory_that_another_node_does_not_see_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        cluster, "find_unseen", lambda written: [name for name in written if name == str(ours)]
    )  # a second file system is not to be had here; `find_unseen` itself has a test below
    members = [member("a"), member("b")]

    def look(part: Room) -> list[Any]:
        return cluster._check_directories(part, members, [0, 1], [ours, theirs])

    for findings in together([look, look]):
        assert [(finding.level, finding.message) for finding in findings] == [
            ("ok", f"{tmp_path} is shared by all nodes"),
            ("problem", f"{ours} is not shared with a b"),
            ("problem", f"{theirs} cannot be written by a"),
        ]
    assert list(tmp_path.rglob(".dsplan-doctor-*")) == []


def test_a_file_that_is_not_there_is_unseen(tmp_path: Path) -> None:
    with write_tokens([tmp_path, tmp_path / "none"]) as written:
        assert written[str(tmp_path / "none")] == ""
        assert find_unseen(written) == []
    assert find_unseen(written) == [str(tmp_path)]


def test_a_node_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    members = [
        cluster.Member(node=node, address="127.0.0.1", port=port, local_rank=0, versions={}) for node in ("a", "b")
    ]
    findings = together([lambda part: cluster._check_reach(part, members, [0, 1])] * 2)
    assert findings[0] == findings[1]
    assert [finding.message for finding in findings[0]] == [
        f"{here} cannot connect to {there} at 127.0.0.1:{port} (Connection refused)"
        for here, there in (("a", "b"), ("b", "a"))
    ]


def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LIMIT_SECONDS", 0.1)
    with pytest.raises(DsplanError, match="rank 1 says nothing of its weather; its own output says why"):
        Room(HashStore(), 0, 2).share("weather", "fine")
