"""Launcher: whatever starts a run's ranks, as the supervisor sees it."""

from __future__ import annotations

import signal
from importlib import import_module
from typing import Protocol, cast

from strategies.run_directory.spec import LauncherName, LaunchSpec

LAUNCHERS: dict[LauncherName, str] = {
    "local": "strategies.launch.launchers.local:LocalLauncher",
    "slurm": "strategies.launch.launchers.slurm:SlurmLauncher",
    "mpi": "strategies.launch.launchers.mpi:MpiLauncher",
    "ray": "strategies.launch.launchers.ray:RayLauncher",
    "deepspeed": "strategies.launch.launchers.deepspeed:DeepSpeedLauncher",
    "accelerate": "strategies.launch.launchers.accelerate:AccelerateLauncher",
}
"""Where each launcher's class is; it is made from the LaunchSpec alone."""


class Launcher(Protocol):
    """One attempt: every rank once, each as `python -u -m strategies.launch.rank_main SPEC` in a fresh process.

    A context manager: entering starts the ranks, leaving stops whatever of them still runs, wherever it runs. When the
    ranks have ended by themselves, the launcher leaves `result.json` in the run directory before `poll` reports:
    `{"failures": {rank: exit status, negative for a signal}}`, and where it knows more than the ranks could say
    themselves `"kind"` (a word of `endings`) and `"reason"` (one line).
    """

    def __enter__(self) -> Launcher: ...

    def __exit__(self, *exception: object) -> None: ...

    def poll(self) -> int | None:
        """Return the exit status: 0 when every rank ended with 0; None while any runs."""

    def remarks(self) -> list[str]:
        """Return what it has to say itself since the last call, line by line."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that is ready for it. Called again and again until they end."""

    def stop(self) -> None:
        """End every rank: SIGTERM, after ten seconds SIGKILL; return when none is left."""


def make_launcher(spec: LaunchSpec) -> Launcher:
    """Return the launcher that the spec names."""
    module, name = LAUNCHERS[spec.placement.launcher].split(":")
    return cast("Launcher", getattr(import_module(module), name)(spec))
