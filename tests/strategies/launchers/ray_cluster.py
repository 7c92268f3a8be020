"""A Ray cluster of several nodes on this machine, each a raylet of its own: `ray.cluster_utils.Cluster`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from tests.strategies.launchers.launched import ROOT
from tests.strategies.launchers.one_node_slurm import free_ports

_OBJECT_STORE_BYTES = 80 * 2**20
# jsonschema, which every process of Ray imports, compiles this package's grammar for 4 s where it is installed, as
# it is with our development tools; a raylet gives its agents 15.
_SLOW = "rfc3987_syntax"


def missing() -> str:
    """Return why there can be none here; empty where there can."""
    return "" if find_spec("ray") is not None else "needs Ray (pip install 'dsplan[ray]')"


class RayCluster:
    """A head without resources and nodes of one CPU each, so that each takes one rank."""

    def __init__(self, cluster: Any, variables: dict[str, str]) -> None:
        self._cluster = cluster
        self._nodes: list[Any] = []
        self.variables = variables
        """With which a command finds its Ray processes started as quickly as the cluster's."""

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        with mock.patch.dict(os.environ, self.variables):
            self._nodes.append(self._cluster.add_node(num_cpus=1, **_settings()))

    def remove(self) -> None:
        """Take away the node that is the longest there, with all that runs on it."""
        self._cluster.remove_node(self._nodes.pop(0))

    def drain(self, node_id: str) -> None:
        """Announce that a node goes in five minutes, as a spot market does."""
        words = ["--address", self.address, "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "reclaimed", "--deadline-remaining-seconds", "300"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words]
        subprocess.run(command, env={**os.environ, **self.variables}, check=True)

    @property
    def options(self) -> tuple[str, ...]:
        """Of a run of one rank per node."""
        return ("--launcher", "ray", "--ray-address", self.address, "--nproc", "1")


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """A cluster, until the block ends."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / f"{_SLOW}.py").write_text('raise ImportError("its grammar is compiled for seconds")\n')
        # Ray runs what it starts at niceness 15, which on a machine that is busy is hardly at all.
        path = os.pathsep.join(filter(None, (directory, str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        with mock.patch.dict(os.environ, variables):
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_settings()})
        try:
            started = RayCluster(cluster, variables)
            for _ in range(nodes):
                started.add()
            yield started
        finally:
            cluster.shutdown()


def _settings() -> dict[str, int]:
    """With ports that are known a raylet does not wait for its agents."""
    names = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port", "metrics_export_port")
    return {"object_store_memory": _OBJECT_STORE_BYTES, **dict(zip(names, free_ports(len(names)), strict=True))}
