"""`accelerate launch`: the ranks of this machine, with accelerate's variables around them.

Source: `accelerate launch --help` of accelerate 1.12 to 1.15, accelerate/commands/launch.py.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import yaml

from hardware_db.errors import DsplanError
from strategies.distributed.launcher_env import DEFAULT_PORT
from strategies.launch.launchers.process import RANK_MODULE, ProcessLauncher

_CONFIG = "accelerate.yaml"
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) .*?\n\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)


class AccelerateLauncher(ProcessLauncher):
    """`accelerate launch` with a config of its own, so that the user's default one cannot ask for other ranks."""

    def command(self) -> list[str]:
        """Return the command line, whose config is written into the run directory."""
        if find_spec("accelerate") is None:
            raise DsplanError("accelerate is not installed here; pip install 'dsplan[train]', or leave out --launcher")
        path = self.spec.directory / _CONFIG
        path.write_text(yaml.safe_dump(self._config(), sort_keys=False))
        return [
            *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(path)),
            *self.placement.options,
            *("--module", RANK_MODULE, str(self.spec.path)),
        ]

    def result(self, status: int) -> dict[str, object]:
        """Return the exit statuses in elastic's report."""
        return {"failures": {int(rank): int(code) for rank, code in _RANK.findall(self.output)}}

    def _config(self) -> dict[str, object]:
        nodes, ranks = self.placement.most_nodes, self.placement.most_nodes * self.spec.processes
        return {
            "compute_environment": "LOCAL_MACHINE",
            # MULTI_CPU would start the ranks through mpirun; what they run on is said by ACCELERATE_USE_CPU.
            "distributed_type": "MULTI_GPU" if ranks > 1 else "NO",
            "num_machines": nodes,
            "num_processes": ranks,
            "machine_rank": self.placement.node_rank or 0,
            "mixed_precision": "no",
            "use_cpu": False,
            **(self._meeting() if nodes > 1 else {"rdzv_backend": "static", "main_process_port": 0}),
        }

    def _meeting(self) -> dict[str, object]:
        if self.placement.rendezvous is None or self.placement.node_rank is None:
            raise DsplanError(
                "accelerate starts each machine's ranks from that machine; name --rendezvous HOST:PORT, the first"
                " machine's address, and --node-rank K on every machine"
            )
        host, _, port = self.placement.rendezvous.rpartition(":")
        return {"rdzv_backend": "static", "main_process_ip": host, "main_process_port": int(port or DEFAULT_PORT)}
