"""The process between `dsplan run` and the ranks: torch elastic starts them, watches them, and ends them together.

Run as `python -m strategies.launch.agent SPEC PARENT_PID`. It is a process of its own so that elastic's signal
handlers, its logging and the seconds of importing torch stay out of the command that draws the progress.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from strategies.launch.die_with_parent import die_with_parent
from strategies.launch.place import AGENT_PID
from strategies.launch.spec import LaunchSpec, keep_result

_WATCH_SECONDS = 0.5
"""How often elastic looks at the ranks, which may need the processor that it takes to look."""


def main(spec_path: str, parent: str) -> int:
    """Run the ranks to their end; 0 when all succeeded. `result.json` gets the exit code of every failed rank.

    One of several nodes stays for the attempts that follow, each asked for by a line on standard input.
    """
    die_with_parent(signal.SIGTERM, int(parent))
    spec = LaunchSpec.load(Path(spec_path))
    os.environ[AGENT_PID] = str(os.getpid())
    try:
        return _one_node(spec) if spec.placement.rendezvous is None else _among_nodes(spec)
    except SignalException as error:
        return 128 + int(error.sigval)


def _one_node(spec: LaunchSpec) -> int:
    try:
        elastic_launch(_configuration(spec), sys.executable)("-u", "-m", "strategies.launch.rank_main", str(spec.path))
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        keep_result(spec.directory, {"failures": failures})
        return 1
    keep_result(spec.directory, {"failures": {}})
    return 0


def _among_nodes(spec: LaunchSpec) -> int:
    from strategies.launch.nodes import serve

    return serve(spec)


def _configuration(spec: LaunchSpec) -> LaunchConfig:
    """One node, no restarts, a c10d rendezvous on a port the system picks."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        monitor_interval=_WATCH_SECONDS,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(spec.directory / "elastic")),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
