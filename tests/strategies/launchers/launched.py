"""`dsplan run` of the training script through any launcher, and the losses it left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("trained_rank.py")
PATIENCE_SECONDS = 250.0
_DSPLAN_RUN = (sys.executable, "-m", "dsplan", "run")


def path_of_a_node(commands: Path) -> str:
    """Return the PATH of a node that this machine stands in for: its own commands, and no dsplan of this machine's."""
    machine = (folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "dsplan").exists())
    return os.pathsep.join([str(commands), *machine])


class Launched:
    """A run in a directory: `start` it, once or on several nodes, and `finish` it."""

    def __init__(self, directory: Path, variables: Mapping[str, str] | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.losses_file = directory / "losses"
        self.run_directory = directory / "run"
        self._variables = {"LOSSES": str(self.losses_file), **(variables or {})}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, *options: str, before: Sequence[str] = (), run_directory: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """`dsplan run OPTIONS SCRIPT` in the background; `before` are words before the command."""
        directory_flag = ["--run-dir", str(run_directory or self.run_directory)]
        return self._start([*before, *_DSPLAN_RUN, *directory_flag, *options, str(SCRIPT)])

    def dsplan(self, *words: str) -> subprocess.Popen[bytes]:
        """`dsplan WORDS` in the background."""
        return self._start([sys.executable, "-m", "dsplan", *words])

    def resume(self) -> subprocess.Popen[bytes]:
        """`dsplan run --resume` in the background."""
        return self._start([*_DSPLAN_RUN, "--resume", str(self.run_directory)])

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self._variables}
        with (self.directory / "out.txt").open("ab") as out:
            process = subprocess.Popen(
                words, cwd=self.directory, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._started.append(process)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status."""
        try:
            return process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.out}") from None

    def until_step(self, step: int) -> None:
        """Wait until a step is in the file of losses."""
        self._until(lambda: max((reached for reached, _, _ in self.rows()), default=0) >= step, f"step {step}")

    def until_step_on(self, steps: int, *, ranks: int) -> None:
        """Wait until so many steps have been trained in a row on so many ranks."""
        self._until(
            lambda: [count for _, count, _ in self.rows()][-steps:] == [ranks] * steps,
            f"{steps} steps on {ranks} ranks",
        )

    def hurry(self) -> None:
        """Let the steps that are left take no longer than they need."""
        self.losses_file.with_name(self.losses_file.name + ".hurry").touch()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.out}"
            assert any(process.poll() is None for process in self._started), f"ended before {what}:\n{self.out}"
            time.sleep(0.05)

    def rows(self) -> list[tuple[int, int, float]]:
        """Step, ranks and loss, as they came."""
        lines = self.losses_file.read_text().splitlines() if self.losses_file.exists() else []
        words = [line.split() for line in lines]
        return [(int(parts[0]), int(parts[1]), float(parts[2])) for parts in words if len(parts) == 3]

    def losses(self) -> list[float]:
        """The loss of every step; of a step that was trained again the later."""
        by_step = {step: loss for step, _, loss in self.rows()}
        assert sorted(by_step) == list(range(1, len(by_step) + 1)), f"steps {sorted(by_step)}:\n{self.out}"
        return [by_step[step] for step in sorted(by_step)]

    @property
    def out(self) -> str:
        return (self.directory / "out.txt").read_text()

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                process.kill()
            process.wait()


@contextlib.contextmanager
def launched(directory: Path, variables: Mapping[str, str] | None = None) -> Iterator[Launched]:
    """A run whose commands are ended with the block."""
    run = Launched(directory, variables)
    try:
        yield run
    finally:
        run.end()
