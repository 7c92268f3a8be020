"""Decisions of `dsplan run` on a machine's cards, as its ranks get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda import environment, machine

_SCRIPT = """
import torch
from strategies.run_directory.machine import own_machine
print([gpu.name for gpu in own_machine().usable_gpus], torch.cuda.device_count(), torch.zeros(1, device="cuda").device)
"""


def _run(name: str, folder: Path, *flags: str) -> tuple[int, str, str]:
    """Run a script that trains nothing; its status, its first rank's output, and the lines of the command."""
    script = folder / "look.py"
    script.write_text(_SCRIPT)
    variables = {**os.environ, **environment(machine(name), folder), "DSPLAN_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "dsplan", "run", "--run-dir", str(folder / "run"), *flags, str(script)]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=280)
    return ran.returncode, (folder / "run" / "rank0.stdout.log").read_text(), ran.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_ranks_take_cards_that_torch_alone_sees(tmp_path: Path) -> None:
    status, output, lines = _run("no_nvml", tmp_path, "--nproc", "1")
    assert (status, output) == (0, f"{['NVIDIA H100 80GB HBM3'] * 2} 2 cuda:0\n")
    assert "torch sees 2 x NVIDIA H100 80GB HBM3, which the run takes though no driver lists them" in lines


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_the_rank_of_a_slice_sees_the_one_that_is_planned_for(tmp_path: Path) -> None:
    status, output, _ = _run("mig", tmp_path)
    assert (status, output) == (0, "[] 1 cuda:0\n")
