"""One program that starts the ranks and ends with them: what all launchers have in common."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from hardware_db.files import provide_torch_extensions
from hardware_db.notices import LABEL
from hardware_db.probe.cgroup import usable_cores
from strategies.launch.run_lock import launcher_lock
from strategies.run_directory.files import AGENT_LOG, RESULT_FILE, keep_result
from strategies.run_directory.spec import LaunchSpec, Placement
from strategies.telemetry.follow import LineFollower

RANK_MODULE = "strategies.launch.rank_main"
# What is started gets this long to end with its ranks before it is killed; NCCL teardown takes a few seconds.
_GRACE_SECONDS = 10.0


class ProcessLauncher(ABC):
    """The program that starts the ranks, as a process. Leaving the context stops whatever still runs."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begins = 0
        self._log: LineFollower | None = None

    @property
    def placement(self) -> Placement:
        """The nodes that ranks start on, and by whom."""
        return self.spec.placement

    @property
    def output(self) -> str:
        """The output of the program itself in this attempt."""
        with (self.spec.directory / AGENT_LOG).open("rb") as log:
            log.seek(self._log_begins)
            return log.read().decode(errors="replace")

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line.

        Raises:
            DsplanError: something it needs is not there.
        """

    @property
    def takes_lines(self) -> bool:
        """True if the program reads its standard input."""
        return False

    @property
    def ends_its_ranks(self) -> bool:
        """True if the program ends with this process, and its ranks with it; others have a keeper."""
        return False

    def environment(self) -> dict[str, str]:
        """Return the environment: this process's, the run's variables, and dsplan importable from anywhere."""
        return launch_environment(self.spec)

    def result(self, status: int) -> dict[str, object] | None:
        """Return the content of `result.json` on the ranks' end, or None if the program writes it by itself."""
        return {"failures": {}}

    def __enter__(self) -> ProcessLauncher:
        path = self.spec.directory / AGENT_LOG
        self._log = LineFollower(path, offset=path.stat().st_size if path.exists() else 0)
        self._process = self.begin()
        return self

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the program.

        Raises:
            DsplanError: something it needs is not there, or the ranks of an earlier start do not end.
        """
        command, directory = self.command(), self.spec.directory
        if not self.ends_its_ranks:
            command = [sys.executable, "-m", "strategies.launch.elastic.keeper", str(os.getpid()), *command]
        with launcher_lock(directory) as lock, (directory / AGENT_LOG).open("ab") as log:
            self._log_begins = log.tell()
            # A session of its own: Ctrl-C reaches only this process, which then stops the ranks in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE if self.takes_lines else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def poll(self) -> int | None:
        """Return the program's exit status, None while it runs."""
        status = None if self._process is None else self._process.poll()
        if status is not None and not (self.spec.directory / RESULT_FILE).exists():
            result = self.result(status)
            if result is not None:
                keep_result(self.spec.directory, result)
        return status

    def remarks(self) -> list[str]:
        """Return the lines of its log that are dsplan's own."""
        lines = self._log.read_lines() if self._log is not None else []
        return [line for line in lines if line.startswith(LABEL)]

    def hand_signal(self, number: signal.Signals) -> None:
        """Send a signal to the program, which hands it on to every rank, once any is ready for it."""
        running = self._process is not None and self._process.poll() is None
        if self._process is not None and running and any(self.spec.directory.glob("rank*.pid")):
            self._process.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks of this host that are ready for it, which notify the others."""
        signal_ranks(self.spec, number)

    def stop(self) -> None:
        """End the program and the ranks: SIGTERM, which it hands on, then SIGKILL for what is left."""
        if self._process is not None:
            end(self._process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that starts ranks, and them: SIGTERM, which it hands on, then SIGKILL for what is left."""
    if process.poll() is not None:
        return
    process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        # Ranks asked the kernel to die with their parent (see die_with_parent), each is a group of its own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def launch_environment(spec: LaunchSpec) -> dict[str, str]:
    """Return the environment of whatever starts the ranks of `spec`, and of the ranks."""
    variables = {
        **os.environ,
        **import_path(Path(__file__).resolve().parents[3]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // spec.processes))),
        # Keeps a `planner` or `strategies` folder in the working directory from hiding dsplan's (Python 3.11 on).
        "PYTHONSAFEPATH": "1",
        **spec.environment,
    }
    provide_torch_extensions(variables)
    return variables


def import_path(root: Path) -> dict[str, str]:
    """Return the variable by which ranks find dsplan in `root`; none where every process finds it there anyway.

    The folder of all installed packages must not go before a user's own path, whose libraries it would hide.
    """
    if root == Path(sysconfig.get_path("purelib")).resolve():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


def rank_command(spec: LaunchSpec) -> list[str]:
    """Return what every rank runs, with SIGUSR1 ignored, which ends a process without a handler for it.

    A launcher that hands signals on does not ask whether the ranks are ready; what is ignored stays so over `exec`.
    """
    return ["sh", "-c", 'trap "" USR1; exec "$0" "$@"', sys.executable, "-u", "-m", RANK_MODULE, str(spec.path)]


def signal_ranks(spec: LaunchSpec, number: signal.Signals) -> None:
    """Send a signal to every rank of this host that wrote its process id, which it does when it is ready for it."""
    for path in spec.directory.glob("rank*.pid"):
        with suppress(OSError, ValueError):
            process_id = int(path.read_text())
            # The file may be another host's, in a directory that they share, or the number another process's by now.
            command = Path(f"/proc/{process_id}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if RANK_MODULE in command and str(spec.path) in command:
                os.kill(process_id, number)
