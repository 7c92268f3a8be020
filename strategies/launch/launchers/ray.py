"""Ray: the ranks as processes of one actor per node, on a cluster of the person's or on a Ray of this machine alone.

Sources: the Ray documentation of `ray.init`, placement groups and "Actor fault tolerance", Ray 2.60.
"""

from __future__ import annotations

import re
import signal
import sys
from importlib.util import find_spec

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from strategies.distributed.network import speaks_http, why_unanswered
from strategies.launch.launchers.process import ProcessLauncher
from strategies.run_directory.spec import Placement

_RESOURCE = re.compile(r"([A-Za-z_][\w:.-]*)=(\d+(?:\.\d+)?)")
_HOW_TO_REACH = (
    "start dsplan run on a node of the cluster, or by `ray job submit`, with --ray-address auto or HOST:PORT"
)


class RayLauncher(ProcessLauncher):
    """A driver of Ray per attempt, which reserves the nodes, starts the ranks on them and ends with them."""

    def command(self) -> list[str]:
        """Return the command line of the driver, once what can be seen from here is right."""
        if find_spec("ray") is None:
            raise DsplanError("Ray is not installed here; pip install 'dsplan[ray]', or leave out --launcher")
        node_resources(self.placement, self.spec.processes)
        check_address(self.placement.ray_address)
        return [sys.executable, "-m", "strategies.launch.launchers.ray_driver", str(self.spec.path)]

    def environment(self) -> dict[str, str]:
        """Return the environment, with plain logs of the actors.

        A Ray of this machine alone reports to nobody, and does not run the ranks behind all else (niceness 15).
        """
        variables = {**super().environment(), "RAY_COLOR_PREFIX": "0"}
        if self.placement.ray_address is None:
            variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        return variables

    def signal(self, number: signal.Signals) -> None:
        """Hand a signal to the driver, which hands it on to every rank on every node."""
        self.hand_signal(number)


def node_resources(placement: Placement, processes: int) -> dict[str, float]:
    """Return what Ray has to reserve on each node beside GPUs: a CPU per rank, and what `--launcher-option` names.

    Raises:
        DsplanError: an option is no NAME=NUMBER.
    """
    resources = {"CPU": float(processes)}
    for option in placement.options:
        match = _RESOURCE.fullmatch(option)
        if match is None:
            raise DsplanError(
                f"--launcher-option {quote(option)} is no resource of Ray; write NAME=NUMBER per node, such as CPU=32"
            )
        resources[match[1]] = float(match[2])
    return {name: amount for name, amount in resources.items() if amount}


def check_address(address: str | None) -> None:
    """Refuse an address at which no Ray can be.

    Raises:
        DsplanError: it is of Ray's client, is no address, or nothing or a web server answers there.
    """
    if address in (None, "auto"):
        return
    if "://" in str(address):
        raise DsplanError(f"--ray-address {quote(address)}: Ray's client starts no ranks; {_HOW_TO_REACH}")
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise DsplanError(f"--ray-address {quote(address)} is no address; write auto, or HOST:PORT as `ray start` says")
    try:
        why = why_unanswered(host.strip("[]"), int(port))
    except OSError as problem:
        why = problem.strerror
    if why:
        raise DsplanError(f"--ray-address {address}: no Ray answers there ({why}); {_HOW_TO_REACH}")
    if speaks_http(host.strip("[]"), int(port)):
        raise DsplanError(
            f"--ray-address {address}: a web server answers there, such as Ray's dashboard; name the port that"
            " `ray start` says, 6379 by default"
        )
