"""`dsplan doctor` started on several ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tests.strategies.distributed.starts import Starter, open_mpi
from tests.strategies.distributed.test_rendezvous import free_port


def test_ranks_time_every_link_and_the_first_tells(starter: Starter, tmp_path: Path) -> None:
    port, home = free_port(), {"DSPLAN_HOME": str(tmp_path), "HOME": os.environ["HOME"]}
    started = [{**open_mpi(rank, 3, port), **home} for rank in range(3)]
    first, *others = starter.run("dsplan", started, "doctor", "--json", "--directory", str(tmp_path))
    assert [process.lines for process in others] == [[], []]
    told = json.loads("\n".join(first.lines))
    assert told["ranks"] == 3
    assert told["hosts"] == [socket.gethostname()]
    assert [process.status for process in (first, *others)] == [0 if told["healthy"] else 1, 0, 0]
    assert sorted(tuple(link["ranks"]) for link in told["links"]) == [(0, 1), (0, 2), (1, 2)]
    assert all(link["bandwidth_bytes_per_s"] > 0 and link["latency_seconds"] > 0 for link in told["links"])
    assert {finding["check"] for finding in told["findings"]} >= {"software", "interface", "link"}
