"""`dsplan doctor`: this machine, or with several ranks the machines of the job. torch is imported for the latter."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from dsplan.diagnostics.doctor.finding import Diagnosis, Finding, sorted_findings, write_tokens
from dsplan.diagnostics.doctor.machine import limit_findings, software_findings
from dsplan.diagnostics.doctor.network import network_findings
from hardware_db.errors import DsplanError
from hardware_db.probe import probe
from hardware_db.probe.machine import Machine
from strategies.distributed.launcher_env import read_process_variables


def examine(directories: Sequence[Path] = ()) -> Diagnosis:
    """Make every check of this machine and, where a launcher started several ranks, of all of theirs together.

    `directories` are those that all nodes have to share.

    Raises:
        DsplanError: the launcher's variables contradict each other, or the ranks cannot meet.
    """
    process = read_process_variables(os.environ)
    machine = probe()
    findings = machine_findings(machine)
    if process.meeting_point is None:
        findings += _directory_findings(directories)
        return Diagnosis(hosts=(socket.gethostname(),), ranks=1, findings=sorted_findings(findings))
    if machine.software.version("torch") is None:
        raise DsplanError("torch is not installed here, and ranks need it to meet; pip install 'dsplan[train]'")
    from dsplan.diagnostics.doctor.cluster import examine_cluster

    return examine_cluster(process, machine, findings, directories)


def _directory_findings(directories: Sequence[Path]) -> list[Finding]:
    """Report whether this machine can write to the directories; a doctor on all nodes says whether others see them."""
    with write_tokens(directories) as written:
        return [
            Finding(check="shared", message=f"{directory} can be written; start the doctor on all nodes to compare")
            if name
            else Finding.problem("shared", f"{directory} cannot be written here", "make it, or mount it, on every node")
            for directory, name in written.items()
        ]


def machine_findings(machine: Machine) -> list[Finding]:
    """Make the checks of one machine by itself."""
    return [
        *software_findings(machine),
        *network_findings(),
        *limit_findings(machine.host, gpus=len(machine.usable_gpus)),
    ]
