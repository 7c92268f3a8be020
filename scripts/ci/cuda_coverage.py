"""Counts the lines that name CUDA or depend on the device's type which a command runs, in all its processes.

    python -m scripts.ci.cuda_coverage [--before COMMAND] [--after COMMAND]

Prints the share of each command and every line that `--after` left out, with the reason where `_REASONS` has one. The
usual commands are some tests of ranks as the suite has them, and all that runs with emulated cards or traces for cards,
which takes an hour, with the tests of what is refused where there are none. The status is 1 below 95 %.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.emulated_cuda import HERE
from tests.emulated_cuda.lines import ROOMS, ROOT, lines_of

Line = tuple[str, int]
_TESTS = "tests/strategies tests/dsplan/diagnostics tests/hardware_db tests/dsplan/report tests/dsplan/mpi"
_BEFORE = f"python -m pytest -n 2 --dist loadfile -p no:cacheprovider {_TESTS} --ignore=tests/strategies/cuda"
_CARDS = "python -m pytest --cards tests/strategies/telemetry/test_step_profile.py"
_TRACES = "python -m pytest -n 2 --dist loadfile tests/strategies/tracing"
_ADAPTERS = "python -m pytest -m slow -k 'closed_forms and llama-3-8b' tests/strategies/tracing/test_adapters.py"
_REFUSALS = (
    "python -m pytest tests/strategies/engine/test_kernels.py tests/strategies/launch/test_device.py"
    " tests/strategies/telemetry/test_logs.py tests/dsplan/diagnostics/doctor/test_cluster.py"
)
_AFTER = f"scripts/ci/cuda.sh; scripts/ci/cuda.sh -m slow; {_CARDS}; {_TRACES}; {_ADAPTERS}; {_REFUSALS}"
_LEAST = 0.95
_TWO_KINDS = "ranks on two kinds of GPUs in one job: emulated cards of a machine are of one kind"
_REASONS = {
    "strategies/engine/initialize.py:gpu = ": _TWO_KINDS,
    "strategies/engine/initialize.py:if why := why_another_group": _TWO_KINDS,
    "strategies/engine/initialize.py:raise CannotRun(why)": _TWO_KINDS,
    "strategies/modules/adapters.py:device = ": "bitsandbytes is not there: its kernels are compiled for real cards",
}


def all_lines() -> dict[Line, str]:
    """Return the text of each such line; that of an expression's branch for cards has a negative number."""
    texts: dict[Line, str] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for number in lines_of(source):
            texts[path.relative_to(ROOT).as_posix(), number] = source.splitlines()[abs(number) - 1].strip()
    return texts


def lines_run_by(command: str) -> set[Line]:
    """Run a shell's command and return what its processes ran of the lines."""
    with tempfile.TemporaryDirectory(prefix="cuda-lines-") as folder:
        path = os.pathsep.join([str(HERE / "startup"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        variables = {**os.environ, "CUDA_LINES": folder, "PYTHONPATH": path, "PATH": programs}
        subprocess.run(["bash", "-c", command], env=variables, cwd=ROOT, check=False)
        return lines_in(Path(folder))


def lines_in(folder: Path) -> set[Line]:
    """Return what processes whose CUDA_LINES was this folder have run."""
    written = {line for path in folder.iterdir() for line in path.read_text(encoding="utf-8").split()}
    return {(path, int(number)) for path, _, number in (line.rpartition(":") for line in written)}


def main() -> int:
    """Run both commands and print what they ran."""
    parser = argparse.ArgumentParser(prog="python -m scripts.ci.cuda_coverage")
    parser.add_argument("--before", metavar="COMMAND", default=_BEFORE)
    parser.add_argument("--after", metavar="COMMAND", default=_AFTER)
    parser.add_argument("--folders", nargs=2, type=Path, metavar="FOLDER", help="what CUDA_LINES left of both, instead")
    options = parser.parse_args()
    texts = all_lines()
    if options.folders:
        before, after = (lines_in(folder) for folder in options.folders)
    else:
        before, after = lines_run_by(options.before), lines_run_by(options.after)
    after |= before
    left = sorted((line for line in texts if line not in after), key=lambda line: (line[0], abs(line[1])))
    for path, number in left:
        reason = next((why for start, why in _REASONS.items() if f"{path}:{texts[path, number]}".startswith(start)), "")
        print(f"{path}:{abs(number)}: {texts[path, number]}{f'  [{reason}]' if reason else ''}")
    for name, run in (("before", before), ("after", after)):
        count = len(run & texts.keys())
        print(f"{name}: {count} of {len(texts)} lines, {count / len(texts):.1%}")
    return 0 if 1 - len(left) / len(texts) >= _LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
