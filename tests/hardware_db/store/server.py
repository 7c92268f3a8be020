"""A PostgreSQL server of the tests' own, from the system's packages: no port, a socket in a temporary directory."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

_START_SECONDS = 60.0


@dataclass
class Server:
    """A server that can be killed and started again; its clients connect through the socket in `folder`."""

    folder: Path
    programs: Path
    durable: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _schemas: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def make(self) -> None:
        """Make the database's files."""
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "dsplan", "-A", "trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = [f"unix_socket_directories={self.folder}", "listen_addresses=", "max_connections=200"]
        settings += [] if self.durable else ["fsync=off"]
        options = [word for setting in settings for word in ("-c", setting)]
        command = [str(self.programs / "postgres"), "-D", str(self.folder / "data"), *options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **_as_user())
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-3000:])
            time.sleep(0.05)

    def kill(self) -> None:
        """End all its processes at once, as a power cut would."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        for child in _children_in(self.folder):
            os.kill(child, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End it, without waiting for clients."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=30)

    def address(self, *, user: str = "dsplan", schema: str = "public", database: str = "postgres") -> str:
        """Return the address of a schema, made where it is not there."""
        if schema != "public":
            self.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        options = {"host": str(self.folder), "options": f"-csearch_path={schema}"}
        return f"postgresql://{user}@/{database}?{urlencode(options, quote_via=quote)}"

    def empty(self) -> str:
        """Return the address of a new, empty schema."""
        return self.address(schema=f"empty_{next(self._schemas)}")

    def execute(self, statement: str) -> None:
        """Run a statement as the owner."""
        import psycopg

        with psycopg.connect(self.address(), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _answers(self) -> bool:
        command = [str(self.programs / "pg_isready"), "-h", str(self.folder), "-q"]
        return subprocess.run(command, check=False).returncode == 0

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **_as_user())


@contextmanager
def running_server(*, durable: bool = False) -> Iterator[Server]:
    """A server that ends with the block; skips the test, with the reason, where there is none to start."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed here (Debian, Ubuntu: apt install postgresql)")
    # Short: the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as name:
        folder = Path(name)
        if "user" in (user := _as_user()):
            os.chown(folder, user["user"], -1)
        server = Server(folder=folder, programs=programs, durable=durable)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _programs() -> Path | None:
    """Return the directory of the newest server that is installed."""
    if (path := shutil.which("postgres")) and (folder := Path(path).resolve().parent) and (folder / "initdb").exists():
        return folder
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


def _as_user() -> dict[str, int]:
    """Return arguments of subprocess that make a process another user's: a server refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid}
    pytest.skip("there is no other user than root, as whom a server could run")


def _children_in(folder: Path) -> list[int]:
    """Return the processes of a server whose parent is gone, which would keep its files."""
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(path / "cwd")) == folder / "data":
                left.append(int(path.name))
        except OSError:
            continue
    return left
