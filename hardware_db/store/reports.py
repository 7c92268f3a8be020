"""Reports of runs that go on, for a team's page of runs: figures and names, and nothing of what a command line says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field

from hardware_db.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Whoever added a record to a database that several people share."""

    user: str
    """Name of the account, empty where it has none."""
    host: str
    """Name of the machine."""


def own_origin() -> Origin:
    """Return this process's user and host."""
    import getpass  # with socket milliseconds at every start
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        user = ""
    return Origin(user=user, host=socket.gethostname())


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport:
    """A run at one moment, as its command reports it; figures mean what they do in `strategies.launch.run_status`."""

    id: str
    """The run's own, which a resumed run keeps."""
    name: str
    """The last part of its run directory."""
    user: str
    """Account that the command runs under, empty where it has no name."""
    host: str
    """Machine that the command runs on."""
    state: str
    """`running`, `resumed`, `stalled`, `ended` or `failed`."""
    outcome: str
    """Kind of its end, such as `completed` or `out of memory`; empty while it goes on."""
    model: str
    """Name of the plan's model; empty without a plan."""
    strategy: str
    backend: str
    precision: str
    device: str
    """`gpu` or `cpu`."""
    ranks: int
    began: float
    """Seconds since 1970, by the clock of its host."""
    held_seconds: float
    productive_seconds: float
    device_seconds: float
    usd_per_hour: float | None
    """Published price of a GPU-hour of the plan's node type."""
    step: int
    steps: int | None
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    restarts: int
    checkpoint_step: int | None
    checkpoint_age_seconds: float | None
    quiet_seconds: float | None
    alerts_json: str
    """How often each kind of alert came, as a JSON object."""
    heard_seconds_ago: float = field(default=0.0, compare=False)
    """Age of the report by the clock of the store, which fills it in when it is read."""

    @property
    def alerts(self) -> Mapping[str, int]:
        """The number of alerts of each kind, of those that came."""
        return {str(kind): int(count) for kind, count in json.loads(self.alerts_json).items()}
