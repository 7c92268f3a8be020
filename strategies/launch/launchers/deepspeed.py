"""DeepSpeed's launcher: the ranks of this node, of all nodes of a host file by ssh, or of one node of it without.

Source: `deepspeed --help` of DeepSpeed 0.17 to 0.19, deepspeed/launcher/runner.py and launch.py.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from hardware_db.errors import DsplanError
from strategies.distributed.network import find_free_port
from strategies.launch.launchers.process import RANK_MODULE, ProcessLauncher

_HOSTS = "deepspeed.hosts"


class DeepSpeedLauncher(ProcessLauncher):
    """The `deepspeed` command. With several nodes it needs the host file; `node_rank` says that it starts no other."""

    def command(self) -> list[str]:
        """Return the command line."""
        if find_spec("deepspeed") is None:
            raise DsplanError(
                "DeepSpeed is not installed here; pip install 'dsplan[deepspeed]', or leave out --launcher"
            )
        return [
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *self._nodes(),
            *self.placement.options,
            *("--no_local_rank", "--module", RANK_MODULE, str(self.spec.path)),
        ]

    def _nodes(self) -> list[str]:
        nodes, per_node = self.placement.most_nodes, self.spec.processes
        counts = [f"--num_nodes={nodes}", f"--num_gpus={per_node}"]
        if nodes == 1:
            return [*self._here(), *counts]
        if self.placement.hostfile is None:
            raise DsplanError("DeepSpeed's launcher finds several nodes in a host file only; name it with --hostfile")
        options = [f"--hostfile={self.placement.hostfile}", *counts]
        if self.placement.node_rank is None:
            return options
        return [*options, "--no_ssh", f"--node_rank={self.placement.node_rank}"]

    def _here(self) -> list[str]:
        """Write a host file of this node alone, and return the options that name it.

        Without one the launcher takes no more ranks than it counts accelerators, and on a machine without GPUs that is
        one. Its own port, 29500, may be another run's.
        """
        path = self.spec.directory / _HOSTS
        path.write_text(f"localhost slots={self.spec.processes}\n")
        meeting = ("--master_addr=127.0.0.1", f"--master_port={find_free_port()}")
        return [f"--hostfile={path}", *meeting, "--no_ssh", "--node_rank=0"]
