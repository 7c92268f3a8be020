"""Nodes on one machine: network namespaces, each with an address of its own, joined by a bridge. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

_NETWORK = "10.86.72"


def missing() -> str:
    """Return why there can be none here; empty where there can."""
    if shutil.which("ip") is None:
        return "needs `ip` (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "makes network namespaces, which only root can"
    name = f"dsplan{os.getpid()}t"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def address(node: int) -> str:
    """The address of a node, counted from 0."""
    return f"{_NETWORK}.{node + 1}"


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[list[str]]]:
    """For every node the words before a command that run it there."""
    names = [f"dsplan{os.getpid()}n{node}" for node in range(count)]
    bridge = f"ds{os.getpid()}"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for node, name in enumerate(names):
            _join(name, node, bridge)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _join(name: str, node: int, bridge: str) -> None:
    cable = f"{bridge}v{node}"
    _ip("netns", "add", name)
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", cable, "master", bridge, "up")
    inside: Sequence[Sequence[str]] = (
        ("addr", "add", f"{address(node)}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("link", "set", "lo", "up"),
    )
    for words in inside:
        _ip("-n", name, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
