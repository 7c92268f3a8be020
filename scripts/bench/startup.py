"""Measures whole processes of `dsplan recommend` against `accelerate estimate-memory --help`, alternating in one run.

Builds a virtual environment with nothing but dsplan's base dependencies, so the figure is that of a machine without
torch; `--python` names an environment that has them already. Accelerate runs from the environment of this script.

    python -m scripts.bench.startup [--python PATH] [--rounds N]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECOMMEND = ("-m", "dsplan", "recommend", "--model")
COMMANDS = {
    "dsplan recommend opt-6.7b on 8 GPUs": (*RECOMMEND, "opt-6.7b", "--gpus", "8"),
    **{
        f"dsplan recommend llama-2-70b on 1,024 GPUs, tp/pp, {objective}": (
            *(*RECOMMEND, "llama-2-70b", "--gpus", "1024", "--gpu", "H100-SXM5-80GB", "--all-plans"),
            *("--objective", objective),
        )
        for objective in ("throughput", "cost", "memory")
    },
}
REFERENCE = "accelerate estimate-memory --help"


def base_environment(directory: Path) -> Path:
    """Make an interpreter that has dsplan and its base dependencies only."""
    source = directory / "source"
    # A build leaves its own directories beside the sources, so it works on a copy.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "build", "*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    python = directory / "venv" / "bin" / "python"
    pins = ROOT / "constraints.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", pins, source], check=True, cwd=directory)
    return python


def seconds(command: Sequence[str | Path], directory: Path) -> float:
    """Wall-clock seconds of one process, its output thrown away. `directory` keeps the source tree off its path."""
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(python: Path, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Every command once per round, in turn, after one round that fills the file cache."""
    commands: dict[str, list[str | Path]] = {name: [python, *command] for name, command in COMMANDS.items()}
    commands[REFERENCE] = [Path(sys.executable).with_name("accelerate"), "estimate-memory", "--help"]
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for round_ in range(rounds + 1):
        for name, command in commands.items():
            spent = seconds(command, directory)
            if round_:
                taken[name].append(spent)
    return taken


def main() -> None:
    """Print the seconds that commands take to start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", type=Path, help="interpreter with dsplan's base dependencies")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        python = arguments.python or base_environment(Path(scratch))
        taken = measure(python.absolute(), arguments.rounds, Path(scratch))
    reference = taken[REFERENCE]
    for name, times in taken.items():
        ratio = f"{min(reference) / min(times):.1f}x, {statistics.median(reference) / statistics.median(times):.1f}x"
        print(f"{name:64} min {min(times):.3f} s  median {statistics.median(times):.3f} s  faster {ratio}")


if __name__ == "__main__":
    main()
