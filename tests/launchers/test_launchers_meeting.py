"""A node whose round ends while the nodes meet; no process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from strategies.launch import nodes
from strategies.launch.spec import RESULT_FILE, LaunchSpec
from strategies.process_variables import Address


class _Place:
    def __init__(self) -> None:
        self.has_left = False

    def leave(self) -> None:
        self.has_left = True


@pytest.mark.parametrize(
    ("error", "leaves"), [(DistNetworkError("closed"), True), (RendezvousConnectionError("gone"), False)]
)
def test_a_node_that_loses_another_while_they_meet_gives_its_place_up(
    error: Exception, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec(script="train.py", kind="dsplan", processes=1, run_directory=str(tmp_path))
    places: list[_Place] = []

    class _Agent:
        def __init__(self, spec: LaunchSpec, place: Any) -> None:
            assert place is places[-1]

        def run(self) -> None:
            raise error

    def place_of(handler: object, waits_for: str) -> _Place:
        places.append(_Place())
        return places[-1]

    monkeypatch.setattr(nodes, "_unreached", lambda at: "")
    monkeypatch.setattr(nodes, "_handler", lambda spec, at: None)
    monkeypatch.setattr(nodes, "NodePlace", place_of)
    monkeypatch.setattr(nodes, "_agent", _Agent)
    node = nodes.Node(spec, Address(host="node0", port=29400))
    for _ in range(2):
        node.round()
    told = json.loads((tmp_path / RESULT_FILE).read_text())
    assert (told["kind"], told["status"]) == ("lost", 1)
    assert [place.has_left for place in places] == [leaves, leaves]
