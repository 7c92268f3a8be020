"""Functions that the tests of checkpoints on a real server run on ranks, and a network between them that fails."""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import urlopen

import torch

from hardware_db.errors import DsplanError
from strategies.checkpoint import loading, object_store, retention
from strategies.checkpoint.object_store import location
from strategies.engine.initialize import initialize
from strategies.launch.run_hold import RUNS
from tests.strategies import checkpoint_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

KEY, SECRET = "AKIAOFTHETESTS00", "secret-of-the-tests/0123456789"
ACCOUNT, ACCOUNT_KEY = "accountoftests", b64encode(b"key of the tests").decode()
Scheme = Literal["s3", "az"]
SECRETS = (KEY, SECRET, ACCOUNT_KEY)
AZURITE = shlex.split(os.environ.get("AZURITE", "azurite-blob"))
"""The command that starts Azurite's blob service, Microsoft's own emulator of Azure's."""


@dataclass(frozen=True)
class Server:
    """An object store on a port of this machine."""

    scheme: Scheme
    port: int
    key: str = ACCOUNT_KEY
    """Of Azure's account."""

    def address(self, path: str) -> str:
        """The address of a bucket, or container, and what is below it."""
        return f"{self.scheme}://{path}"

    def variables(self, staging: Path, port: int | None = None) -> dict[str, str]:
        """The environment of ranks that use it, perhaps by another port that leads there."""
        port = self.port if port is None else port
        if self.scheme == "s3":
            return variables(port, staging)
        account = f"AccountName={ACCOUNT};AccountKey={self.key};BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT}"
        connection = f"DefaultEndpointsProtocol=http;{account}"
        return {"AZURE_STORAGE_CONNECTION_STRING": connection, "DSPLAN_STAGING": str(staging)}


def variables(port: int, staging: Path) -> dict[str, str]:
    """The environment of ranks that use an S3 server on a port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "DSPLAN_STAGING": str(staging),
    }


def serve_s3(folder: Path) -> AbstractContextManager[int]:
    """Run moto's S3 server, and return its port."""
    port = free_port()
    program = "import sys; from moto.server import main; main(sys.argv[1:])"
    return _served([sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(port)], {}, port, folder)


def serve_azure(folder: Path) -> AbstractContextManager[int]:
    """Run Azurite, and return its port."""
    port = free_port()
    listening = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    options = [*listening, "--skipApiVersionCheck", "--disableTelemetry"]
    return _served([*AZURITE, *options], {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}, port, folder)


@contextmanager
def _served(command: list[str], environment: dict[str, str], port: int, folder: Path) -> Iterator[int]:
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/", timeout=10).close()
                break
            except HTTPError:
                break  # it refuses who does not say who it is
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


class Network:
    """A way to a port that can be slow, or cut; `port` is its own end."""

    def __init__(self, to: int) -> None:
        self._to, self._pairs = to, set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.bytes_per_second: float | None = None
        self.is_cut = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """End every connection, and refuse new ones until `mend`."""
        self.is_cut = True
        for end in list(self._pairs):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Be whole and fast again."""
        self.is_cut, self.bytes_per_second = False, None

    def close(self) -> None:
        """End everything."""
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to))
            self._pairs |= {near, far}
            for ends in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=ends, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**14):
                if self.bytes_per_second:
                    time.sleep(len(data) / self.bytes_per_second)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self._pairs.discard(end)


def free_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# On ranks.


def make_bucket(address: str) -> None:
    """Make a bucket, or container."""
    object_store.store_of(location(address)).mkdir(address)


def save_for_ever(recipe: Recipe, address: str, begins_at: int, notes: str, *, asynchronous: bool) -> None:
    """Save one step after the other, each with its number in every weight; `notes` gets the steps that are complete."""
    engine = training_bodies.make_engine(recipe)
    training_bodies.one_step(engine, 0)
    engine._global_steps = begins_at
    begun = None
    while True:
        engine._global_steps += 1
        checkpoint_bodies.fill(engine, engine.global_steps)
        _note(engine, notes, f"begins {engine.global_steps}")
        try:
            engine.save_checkpoint(address, {"step": engine.global_steps}, asynchronous=asynchronous, keep_last=2)
        except DsplanError as problem:
            _note(engine, notes, f"failed {problem}")
            continue
        complete = begun if asynchronous else engine.global_steps
        if complete is not None:
            _note(engine, notes, f"complete {complete}")
        begun = engine.global_steps


def _note(engine: Any, notes: str, line: str) -> None:
    if engine.is_main:
        with open(notes, "a") as file:
            file.write(f"{line}\n")


def read_back(recipe: Recipe, address: str) -> tuple[int, str, int, int]:
    """The step that loads, its path, how many checkpoints there are, all whole, and how many are half there.

    The engine is a fresh one, in a process that has no local copy of anything.
    """
    engine = training_bodies.make_engine(recipe)
    training_bodies.one_step(engine, 0)
    path, state = engine.load_checkpoint(address)
    directory = location(address)
    published = retention.published(directory)
    if path is None:
        return 0, "", len(published), 0
    assert checkpoint_bodies.values_of(engine) == {float(state["step"])}
    for each in published:
        loading.open_whole(each)
    halves = [name for name in object_store.names_in(directory) if directory / name not in published]
    return int(state["step"]), str(path), len(published), len(halves)


def after_a_while(network: Network, chance: random.Random, longest: float) -> str:
    """Let time go by on a network that is whole, slow, cut, or cut and mended meanwhile; say which."""
    moments = [chance.uniform(0, longest) for _ in range(2)]
    kind = chance.choice(("whole", "slow", "cut", "mended"))
    time.sleep(moments[0])
    if kind == "slow":
        network.bytes_per_second = 50_000
    elif kind != "whole":
        network.cut()
    time.sleep(min(moments[1], 1.5) if kind == "mended" else moments[1])
    if kind == "mended":
        network.mend()
        time.sleep(chance.uniform(0, longest))
    return kind


def lines_of(path: Path, word: str) -> list[int]:
    """The steps behind a word in the notes."""
    text = path.read_text() if path.exists() else ""
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")]


def wait_until(is_so: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait, or fail."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def newest_of(address: str) -> tuple[int, str, int, int]:
    """The newest checkpoint's step and path, how many there are, all whole, and how many halves of others."""
    directory = location(address)
    published = retention.published(directory)
    steps = [loading.open_whole(path).content.progress["global_steps"] for path in published]
    others = {*object_store.names_in(directory)} - {path.name for path in published} - {RUNS}
    return steps[0], str(published[0]), len(published), len(others)


def save_large(address: str) -> None:
    """Save an engine of 8 M parameters, of which FSDP gives each rank a part."""
    _large_engine().save_checkpoint(address)


def _large_engine() -> Any:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    engine, *_ = initialize(model=model, optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3), strategy="fsdp")
    engine.backward(engine(torch.ones(2, 1024)).sum())
    engine.step()
    return engine


def bytes_read(address: str) -> tuple[int, int, int]:
    """Return what this rank reads of the store to resume, its part of the state, and all that is in the checkpoint."""
    read = 0
    kind: Any = type(object_store.store_of(location(address)))
    original = kind._cat_file

    async def counted(self: Any, *arguments: Any, **named: Any) -> bytes:
        nonlocal read
        data = await original(self, *arguments, **named)
        read += len(data)
        return bytes(data)

    engine = _large_engine()
    kind._cat_file = counted
    try:
        path, _ = engine.load_checkpoint(address)
    finally:
        kind._cat_file = original
    assert path is not None
    own = sum(
        getattr(tensor, "_local_tensor", tensor).nbytes
        for kind in ("parameters", "optimizer")
        for tensor in engine.state_tensors()[kind]
    )
    return read, own, sum(object_store.sizes_in(path).values())


def texts_in(address: str) -> str:
    """Return everything below an address, unpacked."""
    import gzip

    folder = location(address)
    texts = []
    for name in object_store.sizes_in(folder):
        data = object_store.read_small(folder / name, 2**20) or b""
        texts.append((gzip.decompress(data) if name.endswith(".gz") else data).decode())
    return "\n".join(texts)


def kill_whole(process: int) -> None:
    """Kill a process and all that it has started, and those, at once: a machine that is gone."""
    for each in stop_whole(process):
        os.kill(each, signal.SIGKILL)


def stop_whole(process: int) -> list[int]:
    """Stop a process and all that it has started, and return their ids."""
    import psutil

    seen: list[int] = []
    while True:
        tree = [process, *(child.pid for child in psutil.Process(process).children(recursive=True))]
        new = [each for each in tree if each not in seen]
        if not new:
            return seen
        for each in new:
            os.kill(each, signal.SIGSTOP)
        seen += new


def credentials_in(folder: Path) -> list[str]:
    """Files below a folder that have a part of the credentials in them."""
    secrets = [secret.encode() for secret in SECRETS]
    files = (path for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]
