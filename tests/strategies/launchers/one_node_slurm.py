"""A SLURM of one node, this machine, with a munge of its own: for tests that are root where both are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scancel")
_START_SECONDS = 120.0
_CONFIGURATION = """\
ClusterName=dsplan
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=15
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=1
NodeName={host} CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Return why there can be none here; empty where there can."""
    absent = [name for name in _NEEDED if shutil.which(name) is None]
    if absent:
        return f"needs SLURM and munge (apt-get install slurm-wlm munge): no {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "starts SLURM, which only root can"


@contextlib.contextmanager
def one_node_slurm() -> Iterator[dict[str, str]]:
    """The environment variables that lead srun and sbatch to it, while it runs."""
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as name:  # sockets have short paths
        directory = Path(name)
        environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        _lay_out(directory)
        try:
            _start(directory, environment)
            yield {"SLURM_CONF": environment["SLURM_CONF"]}
        finally:
            for daemon in ("slurmd", "slurmctld", "munged"):
                _end(directory / f"{daemon}.pid")


def _lay_out(directory: Path) -> None:
    directory.chmod(0o755)
    for part in ("munge", "state", "spool"):
        (directory / part).mkdir(mode=0o755)
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    text = _CONFIGURATION.format(host=host, ports=free_ports(2), directory=directory)
    (directory / "slurm.conf").write_text(text)


def _start(directory: Path, environment: dict[str, str]) -> None:
    munge = directory / "munge"
    files = {"key-file": "key", "socket": "socket", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={munge / name}" for option, name in files.items()]
    commands = (["munged", *options, f"--pid-file={directory}/munged.pid"], ["slurmctld"], ["slurmd"])
    for command in commands:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + _START_SECONDS
    while (state := _state(environment)) != "idle":
        assert time.monotonic() < deadline, (
            f"the node is {state!r}: {(directory / 'slurmctld.log').read_text()[-2000:]}"
        )
        time.sleep(0.2)


def _state(environment: dict[str, str]) -> str:
    answer = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def _end(pid_file: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        process_id = int(pid_file.read_text())
        os.kill(process_id, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while Path(f"/proc/{process_id}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process_id, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_sockets:
        listeners = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for listening in listeners:
            listening.bind(("127.0.0.1", 0))
        return [listening.getsockname()[1] for listening in listeners]
