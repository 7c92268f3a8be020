"""Runs a command with emulated cards: `python -m tests.emulated_cuda [--cards 2 | --machine mig] -- command ...`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.emulated_cuda import Card, environment, machine, why_not_here


def main() -> None:
    """Replace this process by the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulated_cuda")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--memory-mib", type=int, default=80 << 10, help="of each card")
    parser.add_argument("command", nargs="+")
    parser.add_argument("--machine", help="one of machines.json, in the place of --cards")
    options = parser.parse_args()
    reason = why_not_here()
    if reason:
        sys.exit(f"emulated CUDA: {reason}")
    cards = [Card(total_memory=options.memory_mib << 20)] * options.cards
    here = machine(options.machine) if options.machine else cards
    variables = environment(here, Path(tempfile.mkdtemp(prefix="emulated-cuda-")))
    os.execvpe(options.command[0], options.command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
