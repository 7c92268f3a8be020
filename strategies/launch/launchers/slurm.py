"""SLURM: one `srun` per attempt, a step of the job that `dsplan run` is in, or a job of its own elsewhere.

Sources: srun(1) of SLURM 22.05 for options and signals, and what slurmstepd and srun print of a step's end.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import zlib

from hardware_db.errors import DsplanError
from strategies.launch.launchers.process import ProcessLauncher, rank_command

_ENDED = re.compile(r"srun: error: .*?: tasks? ([\d,-]+): (.+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_NODE_GONE = re.compile(r"(?i)srun: error: (Node failure on \S+|.*node.* failed?\b.*)")
# strsignal(3), in whose words srun reports signals.
_SIGNALS = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.valid_signals()}


class SlurmLauncher(ProcessLauncher):
    """The ranks as tasks of one step; SLURM ends all of them when one fails, and hands signals on to every node."""

    @property
    def name(self) -> str:
        """The step's, by which it is found again where the srun that started it was killed."""
        return f"dsplan-{zlib.crc32(self.spec.run_directory.encode()):08x}"

    def begin(self) -> subprocess.Popen[bytes]:
        """Start srun, when no step of an earlier attempt is left."""
        if shutil.which("squeue") is not None:
            self._cancel_left()
        return super().begin()

    def _cancel_left(self) -> None:
        """Cancel steps of an earlier attempt, which outlive srun: their ranks would write where the next do."""
        words = ["squeue", "--noheader", "--steps", "--format=%i %j"]
        listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        left = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [self.name]]
        if left:
            subprocess.run(["scancel", "--signal=KILL", *left], capture_output=True, check=False)

    def command(self) -> list[str]:
        """Return the command line of srun."""
        if shutil.which("srun") is None:
            raise DsplanError("srun is not installed here; run on a node of a SLURM cluster, or without --launcher")
        nodes, per_node = self.placement.most_nodes, self.spec.processes
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes * per_node}",
            f"--ntasks-per-node={per_node}",
            "--kill-on-bad-exit=1",
            # SLURM would give each task, and all threads that it starts, a single core.
            "--cpu-bind=none",
            f"--job-name={self.name}",
            *self.placement.options,
            *rank_command(self.spec),
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment without what a step would take over of its job."""
        variables = super().environment()
        # What sbatch was asked for, which a step would take over: one task, for the script that `dsplan run` is in.
        for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            variables.pop(name, None)
        return variables

    def signal(self, number: signal.Signals) -> None:
        """Hand a signal to srun, which hands it on to every rank on every node."""
        self.hand_signal(number)

    def result(self, status: int) -> dict[str, object]:
        """Return how the step's ranks ended."""
        return step_result(self.output)


def step_result(output: str) -> dict[str, object]:
    """Return how a step's ranks ended, from what srun and slurmstepd have said."""
    failures: dict[int, int] = {}
    result: dict[str, object] = {"failures": failures}
    for ranks, end in _ENDED.findall(output):
        exit_code = _EXIT_CODE.search(end)
        word = end.strip().removesuffix("(core dumped)").strip().lower()
        code = int(exit_code[1]) if exit_code else -_SIGNALS.get(word, signal.SIGKILL)
        failures.update((rank, code) for rank in _numbers(ranks))
    if "oom_kill event" in output or "Out Of Memory" in output:
        result |= {"kind": "out_of_memory", "reason": "SLURM killed a rank: the job is out of the memory it asked for"}
    elif lost := _NODE_GONE.search(output):
        result |= {"kind": "lost", "reason": lost[1].strip()}
    return result


def _numbers(text: str) -> list[int]:
    """Return the ranks of a list: `0-2,5` is 0, 1, 2 and 5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
