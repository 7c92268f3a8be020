"""A `dsplan run` of the ledger script or another, its processes, and what to do to them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.strategies.faults.ledger import Start, read_starts

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("ledger_script.py")
TOKEN = "FAULTY_RUN"
PATIENCE_SECONDS = 900.0


class FaultyRun:
    """One run directory, in which `dsplan run` is started once or, after it was ended, again with `--resume`.

    Every process below carries a token in its environment, by which it is found wherever it went.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        faults: Sequence[Mapping[str, Any]] = (),
        options: Sequence[str] = (),
        script: Sequence[str] = (str(SCRIPT),),
    ) -> None:
        self.directory = directory
        self.ledger = directory / "ledger"
        self.ledger.mkdir(parents=True)
        self.run_directory = directory / "run"
        self.met: set[int] = set()  # the ranks' processes when the last fault came
        self.damaged: set[int] = set()  # the inodes of checkpoints that something was done to
        self.settings = dict(settings)
        self._options, self._script, self._token = tuple(options), tuple(script), uuid.uuid4().hex
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LEDGER": str(self.ledger),
            "CHECKPOINTS": str(self.checkpoints),
            "SETTINGS": json.dumps(self.settings),
            "FAULTS": json.dumps(list(faults)),
            TOKEN: self._token,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._strangers = {path.name for path in Path("/proc").glob("[0-9]*")}  # they need not be looked at again

    def __enter__(self) -> FaultyRun:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.processes():
            _kill_if_there(pid)
        if self._process is not None:
            self._process.wait()

    @property
    def checkpoints(self) -> Path:
        return self.run_directory / "checkpoints"

    @property
    def out(self) -> str:
        """Return what the command has printed, all of its starts together."""
        return (self.directory / "out.txt").read_text()

    def start(self) -> None:
        self._start("--run-dir", str(self.run_directory), *self._options, *self._script)

    def resume(self) -> None:
        """Start the command again on the run that it was ended in."""
        self._start("--resume", str(self.run_directory))

    def _start(self, *arguments: str) -> None:
        with (self.directory / "out.txt").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dsplan", "run", *arguments],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    @property
    def pid(self) -> int:
        """The command's."""
        assert self._process is not None
        return self._process.pid

    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def wait(self) -> int:
        """The command's exit status."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"dsplan run does not end:\n{self.out}") from None

    def processes(self) -> dict[int, str]:
        """Every process of this run, by id: its command line."""
        by_pid = {}
        for path in Path("/proc").glob("[0-9]*"):
            if (
                path.name not in self._strangers
                and _environment(path).get(TOKEN) == self._token
                and (line := _command_line(path))
            ):
                by_pid[int(path.name)] = line
        return by_pid

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks: id by rank."""
        lines = self.processes()
        ids = [pid for pid, line in lines.items() if "strategies.launch.rank_main" in line]
        return {int(_environment(Path(f"/proc/{pid}")).get("RANK", -1)): pid for pid in ids if _parent(pid) not in ids}

    def agent(self) -> int | None:
        """The process that started the ranks."""
        return next((_parent(pid) for pid in self.ranks().values()), None)

    def has_opened(self) -> bool:
        """Return whether ranks that run have come as far as the loop."""
        return any(_command_line(Path(f"/proc/{pid}")) for start in self.starts()[-1:] for pid in start.processes)

    def left_running(self) -> list[str]:
        """Return what still runs a while after the command ended."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.processes(), seconds=20)
        return [f"{pid} {line}" for pid, line in self.processes().items()]

    def starts(self) -> list[Start]:
        return read_starts(self.ledger)

    def events(self, event: str) -> list[dict[str, Any]]:
        """The journal's lines of one kind."""
        path = self.run_directory / "run.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for line in lines if (row := json.loads(line))["event"] == event]

    def until(self, condition: Callable[[], bool], why: str, *, every: float = 0.05) -> bool:
        """Wait for a condition; False where the command ended before it came."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.ended():
                return condition()
            assert time.monotonic() < deadline, f"waited for {why}:\n{self.out}"
            time.sleep(every)
        return True


def wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {condition}"
        time.sleep(0.05)


def _environment(process: Path) -> dict[str, str]:
    try:
        entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _command_line(process: Path) -> str:
    """Empty for a process that ended."""
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
