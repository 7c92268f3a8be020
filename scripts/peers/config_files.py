"""Reads the configs and scripts of public projects as `dsplan check` does, and writes down what became of each.

    python -m scripts.peers.config_files fetch DIR      the projects' configs at their commits
    python -m scripts.peers.config_files run DIR        reads them all in one run, into config_files.json
    python -m scripts.report.config_files               the page of the docs, from config_files.json

Nothing of the projects is part of this one: of each file the first digits of its SHA-256 and the outcome are kept.
`fetch` needs git and the network, or `--mirrors FOLDER` with clones named `owner+name`. Every 20th file that is read is
also priced on eight A100s, for the time that a whole check takes.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from hardware_db.probe.cgroup import usable_cores
from planner.read.recognise import NoTraining, read_files

RESULTS = Path(__file__).with_name("config_files.json")
PROJECTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "axolotl-ai-cloud/axolotl": ("067b021c8b87a9e5e380b9173c704cf7340e30f5", "examples", (".yaml", ".yml", ".slurm")),
    "hiyouga/LLaMA-Factory": ("ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30", "examples", (".yaml", ".sh", ".json")),
    "modelscope/ms-swift": ("3602360a562313afbf2ef6065fdf61f271a2c5b9", "examples", (".yaml", ".sh")),
    "huggingface/trl": ("f2cd57710ae345ea6428ae95363267fcf38a3dc8", "examples", (".yaml",)),
    "pytorch/torchtune": ("bd2a0fc7c", "recipes/configs", (".yaml",)),
    "NVIDIA-NeMo/RL": ("7ea279abf", "examples/configs", (".yaml",)),
    "volcengine/verl": ("b178a3cd5", "examples", (".sh", ".yaml", ".slurm")),
    "NVIDIA-NeMo/Automodel": ("36044ad3d", "examples", (".yaml",)),
    "AMD-AGI/Primus": ("fd1eeabb", "examples", (".yaml",)),
    "NVIDIA/Megatron-LM": ("d98e8a64ddf34856e74b24714e3bedb2f5a39553", "tests/functional_tests", (".yaml",)),
    "microsoft/DeepSpeedExamples": ("83757d9c", ".", (".sh", ".json", ".yaml")),
    "bigscience-workshop/bigscience": ("9e64ede", "train", (".slurm", ".sh")),
    "OpenRLHF/OpenRLHF": ("3c3be6234e0cb353e76bb8019947db9dfe99fca7", "examples", (".sh",)),
    "huggingface/nanotron": ("2411b022", "examples", (".yaml",)),
    "mosaicml/llm-foundry": ("8c8dd48f7", "scripts/train/yamls", (".yaml",)),
}
"""Each project's commit, the folder that is looked at, and the endings of its configs and scripts."""
OUTCOMES = ("whole", "gaps", "no training", "other code", "not read", "crashed")
"""Outcomes of a file: every key counted or without effect, some named as not counted, refused as no training, refused
as a training by code without a reader, refused otherwise, or an error without a line of its own."""
PRICED_EVERY = 20
_UNREAD_LAUNCH = ("whose flags no reader takes", "is not there; name", " srun", " mpirun", " torchrun")
"""How a refusal says that a training is started whose flags or config are not read."""
_OTHER_CODE = ("which no reader counts", "whose keys are not read here")
"""How a refusal says that something is trained, by code that has no reader."""
_NO_CONFIG = "is no mapping of keys to values"
"""How a refusal says that a file is a list: of environments, of data."""


def fetch(directory: Path, mirrors: Path | None) -> None:
    """Lay the configs of every project below `directory`."""
    for name, (commit, inner, endings) in PROJECTS.items():
        lay_out(name, commit, directory, mirrors, inner, endings)


def lay_out(
    name: str, commit: str, directory: Path, mirrors: Path | None, inner: str = ".", endings: tuple[str, ...] = ("",)
) -> None:
    """Lay the files of a project with these endings below `directory`, where they are not there yet."""
    folder = directory / name.replace("/", "+")
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    mirror = _mirror(name, mirrors, directory)
    listed = _git(mirror, "ls-tree", "-r", "--name-only", commit, "--", inner).decode().splitlines()
    archive = _git(mirror, "archive", commit, "--", *(path for path in listed if path.endswith(endings)))
    with tarfile.open(fileobj=io.BytesIO(archive)) as content:
        content.extractall(unfinished, filter="data")
    unfinished.rename(folder)


def _git(mirror: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(mirror), *arguments], check=True, capture_output=True).stdout


def _mirror(name: str, mirrors: Path | None, directory: Path) -> Path:
    """Return a clone of a project: one that is there, or a bare one of its own."""
    if mirrors is not None:
        base = mirrors / name.replace("/", "+")
        return base / "repo" if (base / "repo").exists() else base
    clone = directory / f"{name.replace('/', '+')}.git"
    if not clone.exists():
        subprocess.run(["git", "clone", "--bare", "--quiet", f"https://github.com/{name}", str(clone)], check=True)
    return clone


def files_of(directory: Path, name: str) -> Iterator[Path]:
    """Yield a project's configs and scripts, relative to the project."""
    _, folder, endings = PROJECTS[name]
    root = directory / name.replace("/", "+")
    for path in sorted((root / folder).rglob("*")):
        relative = path.relative_to(root)
        if path.suffix in endings and path.is_file() and not any(part.startswith(".") for part in relative.parts):
            yield relative


def read_one(path: Path) -> dict[str, Any]:
    """Return digest, outcome, format, reason and seconds of one file."""
    row: dict[str, Any] = {"digest": hashlib.sha256(path.read_bytes()).hexdigest()[:12]}
    start = time.process_time()
    try:
        reading = read_files([path])
        row |= {"outcome": "gaps" if reading.gaps else "whole", "format": reading.format}
        row["reasons"] = sorted({item.reason for item in reading.gaps if "known when it runs" not in item.reason})
    except NoTraining as error:
        row |= {"outcome": _refused(str(error)), "reasons": [str(error).rpartition(": ")[2]]}
    except DsplanError as error:
        row |= {"outcome": "no training" if _NO_CONFIG in str(error) else "not read"}
        row["reasons"] = [str(error).removeprefix(str(path))]
    except Exception:
        row |= {"outcome": "crashed", "reasons": [traceback.format_exc().splitlines()[-1]]}
    row["seconds"] = time.process_time() - start
    return row


def _refused(why: str) -> str:
    """Return the outcome of a file that is refused as no training of a reader's."""
    if any(phrase in why for phrase in _UNREAD_LAUNCH):
        return "not read"
    return "other code" if any(phrase in why for phrase in _OTHER_CODE) else "no training"


def run(directory: Path, only: list[str]) -> None:
    """Read every file, price some, and write the results; with `only` of these projects, the rest as it was."""
    from dsplan.checking import check_files

    base = Path.cwd()
    projects: dict[str, Any] = {}
    priced: list[float] = []
    before = json.loads(RESULTS.read_text("utf-8")) if only else {"projects": {}}
    for name in PROJECTS:
        if only and name not in only:
            projects[name] = before["projects"][name]
            continue
        os.chdir(directory / name.replace("/", "+"))
        rows = []
        for path in files_of(directory, name):
            rows.append(read_one(path))
            if not only and rows[-1]["outcome"] in ("whole", "gaps") and len(rows) % PRICED_EVERY == 0:
                start = time.process_time()
                check_files([path], hardware={"gpus": 8, "gpu": "A100-SXM4-80GB"})
                priced.append(time.process_time() - start)
        os.chdir(base)
        projects[name] = _summary(name, rows)
    machine = {"cpu": _processor(), "cores": usable_cores(), "python": platform.python_version()}
    times = before["priced"] if only else _times(priced)
    results = {"machine": machine, "priced": times, "projects": projects}
    replace_text(RESULTS, json.dumps(results, indent=1, sort_keys=True) + "\n")
    for name, summary in projects.items():
        print(name, summary["counts"])


def _summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(row["outcome"] for row in rows)
    formats = collections.Counter(row["format"] for row in rows if "format" in row)
    gaps = collections.Counter(reason for row in rows if row["outcome"] == "gaps" for reason in row["reasons"])
    return {
        "commit": PROJECTS[name][0],
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "formats": dict(formats),
        "files": [f"{row['digest']} {row['outcome']}" for row in rows],
        "gaps": dict(gaps.most_common(8)),
        "times": _times([row["seconds"] for row in rows]),
    }


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {"count": len(ordered), "median": round(ordered[len(ordered) // 2], 4), "most": round(ordered[-1], 3)}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Fetch or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fetch", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mirrors", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="OWNER/NAME")
    arguments = parser.parse_args()
    if arguments.what == "fetch":
        fetch(arguments.directory, arguments.mirrors)
    else:
        run(arguments.directory.resolve(), arguments.only)


if __name__ == "__main__":
    main()
