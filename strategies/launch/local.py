"""Start the agent on this machine, and end it with everything below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from strategies.launch.spec import LaunchSpec

AGENT_LOG = "agent.log"
# Ranks get this long to end after SIGTERM before they are killed; NCCL teardown takes a few seconds.
_GRACE_SECONDS = 10.0


class LocalLauncher:
    """The agent process of one run. Use as a context manager: leaving it stops whatever still runs."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalLauncher:
        command = [sys.executable, "-m", "strategies.launch.agent", str(self._spec.path), str(os.getpid())]
        with (self._spec.directory / AGENT_LOG).open("wb") as log:
            # A session of its own: Ctrl-C reaches only this process, which then stops the ranks in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self._spec),
                start_new_session=True,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The agent's exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that wrote its process id, which it does when it is ready for signals."""
        for path in self._spec.directory.glob("rank*.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(path.read_text()), number)

    def stop(self) -> None:
        """End agent and ranks: SIGTERM, which the agent hands on, then SIGKILL for what is left."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._process.poll() is None:
            # Ranks asked the kernel to die with the agent (see die_with_parent), each is a process group of its own.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _environment(spec: LaunchSpec) -> dict[str, str]:
    """This process's environment with the run's variables, and with dsplan importable from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.processes))),
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        # Keeps a `planner` or `strategies` folder in the working directory from hiding dsplan's (Python 3.11 on).
        "PYTHONSAFEPATH": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
        **spec.environment,
    }
