"""A node on its way to the others: what it says where they do not meet. No process is started."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from strategies.distributed import network, rendezvous
from strategies.distributed.launcher_env import Address
from strategies.launch.elastic import node_agent, nodes
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.run_directory.files import RESULT_FILE
from strategies.run_directory.spec import LaunchSpec
from strategies.variables import RENDEZVOUS_SECONDS


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
    spec = LaunchSpec(script="train.py", processes=1, run_directory=str(tmp_path), supervision=DEFAULT_SUPERVISION)
    places: list[_Place] = []

    class _Agent:
        def __init__(self, spec: LaunchSpec, meeting: Any) -> None:
            assert meeting is places[-1]

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
    assert [meeting.has_left for meeting in places] == [leaves, leaves]


@contextlib.contextmanager
def _program(answer: bytes | None) -> Iterator[int]:
    """A program at a port of this machine that takes connections and says `answer`; None: nothing, ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(listening.accept()[0])
                    if answer is not None:
                        with kept[-1] as caller:
                            caller.recv(64)
                            caller.sendall(answer)

        threads.submit(serve)
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


def _report_line(directory: Path, host: str, port: int) -> dict[str, Any]:
    """Return what a node that is to meet others at an address writes of it."""
    spec = LaunchSpec(script="train.py", processes=1, run_directory=str(directory), supervision=DEFAULT_SUPERVISION)
    nodes.Node(spec, Address(host=host, port=port)).round()
    told = json.loads((directory / RESULT_FILE).read_text())
    assert isinstance(told, dict)
    assert (told["kind"], told["status"]) == ("refused", 2)
    assert "\n" not in told["reason"]
    assert "is gone" not in told["reason"]
    return told


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (None, "is something that never answers and no run of dsplan"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is a web server and no run of dsplan"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "is another program and no run of dsplan"),
    ],
)
def test_another_program_at_the_rendezvous_is_told_from_one_that_is_gone(
    answer: bytes | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.5)
    monkeypatch.setattr(network, "TRY_SECONDS", 0.5)
    with _program(answer) as port:
        reason = _report_line(tmp_path, "127.0.0.1", port)["reason"]
    assert f"at the rendezvous 127.0.0.1:{port} {what}; give --rendezvous a free port" in reason


@pytest.mark.parametrize(
    ("host", "problem", "what"),
    [
        ("127.0.0.1", None, "nothing listens at the rendezvous 127.0.0.1:1; start dsplan run first on the node"),
        ("127.0.0.1", TimeoutError(), "the rendezvous 127.0.0.1:1 cannot be reached (no answer); check the address"),
        (
            "127.0.0.1",
            OSError(errno.EHOSTUNREACH, "No route to host"),
            "the rendezvous 127.0.0.1:1 cannot be reached (No route to host); check the address",
        ),
        ("no-such-host.invalid", None, "there is no host 'no-such-host.invalid'"),
    ],
)
def test_a_rendezvous_that_was_never_there_is_not_gone(
    host: str, problem: OSError | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        assert problem is not None
        raise problem

    monkeypatch.setenv(RENDEZVOUS_SECONDS, "0.3")
    if problem is not None:
        monkeypatch.setattr(socket, "create_connection", fails)
    reason = _report_line(tmp_path, host, 1)["reason"]
    assert what in reason
    assert reason.endswith("(looked for 300 ms)")


def test_a_rendezvous_that_was_there_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = LaunchSpec(script="train.py", processes=1, run_directory=str(tmp_path), supervision=DEFAULT_SUPERVISION)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    node = nodes.Node(spec, Address(host="127.0.0.1", port=port))
    node._await()
    del store
    monkeypatch.setenv(RENDEZVOUS_SECONDS, "0.3")
    node.round()
    reason = json.loads((tmp_path / RESULT_FILE).read_text())["reason"]
    assert reason.startswith(f"the rendezvous at 127.0.0.1:{port} was there and is gone: nothing listens")
    assert f"dsplan: the rendezvous at 127.0.0.1:{port} is gone; waiting up to 300 ms for it" in capsys.readouterr().out


def test_a_node_that_waits_for_others_says_how_many_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_agent, "_REMARK_SECONDS", 0.02)
    present = [1]

    class _Handler:
        _state_holder = SimpleNamespace(state=SimpleNamespace(participants=present))

        def next_rendezvous(self) -> str:
            time.sleep(0.2)
            present.append(2)
            time.sleep(0.2)
            return "met"

    handler: Any = _Handler()
    waits_for: Any = "of at least 3 nodes at node0:29400"
    assert node_agent.NodePlace(handler, waits_for).next_rendezvous() == "met"  # type: ignore[comparison-overlap]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"dsplan: {count} of at least 3 nodes at node0:29400" for count in (1, 2)]
