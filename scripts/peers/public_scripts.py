"""Runs training scripts of public projects under `dsplan run`, and writes down what became of each.

    python -m scripts.peers.public_scripts fetch DIR            the projects at their commits, and the data
    python -m scripts.peers.public_scripts run DIR              every script in every way, into public_scripts.json
    python -m scripts.peers.public_scripts run DIR --only sft --ways zero2 killed
    python -m scripts.report.public_scripts                     the page of the docs, from public_scripts.json

Nothing of the projects is part of this one. `fetch` needs git and the network, or `--mirrors FOLDER` with clones named
`owner+name`; models, tokenizers and data are made here (scripts/peers/public_data.py). Ways: free (nothing is asked
for), ddp, fsdp, zero2, zero3, and killed: a rank is killed with SIGKILL in the middle of a run under zero2 that saves
(without a strategy where zero2 is refused), and the losses are compared with those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from scripts.peers.public_recipes import PROJECTS, RECIPES, Project, Recipe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("public_scripts.json")
WAYS = ("free", "ddp", "fsdp", "zero2", "zero3", "killed")
LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "lightning")
TIMEOUT_SECONDS = 600.0
_REFUSED = 2
"""The status of a run that cannot be what was asked for."""
_KILL_AT = 4
"""The step of the rank that is killed."""
_ROOMS = "rooms"
"""Holds dsplan as it is installed: without this repository's `scripts`, a name that nanochat's folder has too."""
_EDITED = ".edited"
"""Stands in a project whose scripts have the recipes' edits."""


def fetch(directory: Path, mirrors: Path | None) -> None:
    """Lay every project at its commit below `directory`, with the recipes' edits, and the data beside them."""
    for key, project in track(PROJECTS.items(), description="projects", console=Console(stderr=True)):
        if not (directory / key).exists():
            _lay_out(project, directory / key, mirrors)
        if not (directory / key / _EDITED).exists():
            _edit(directory / key, [recipe for recipe in RECIPES if recipe.project == key])
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    from scripts.peers.public_data import prepare  # imports transformers, which who writes the page needs not

    prepare(data)
    _prepare_nanogpt(directory)
    _prepare_nanochat(directory)


def _lay_out(project: Project, folder: Path, mirrors: Path | None) -> None:
    """One commit without its history, and of its folders only those that are needed."""
    source = f"https://github.com/{project.name}"
    if mirrors is not None:
        source = str(mirrors / project.name.replace("/", "+") / "repo")
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    for arguments in (
        ("init", "--quiet", str(unfinished)),
        ("-C", str(unfinished), "sparse-checkout", "set", *project.folders),
        ("-C", str(unfinished), "fetch", "--quiet", "--depth", "1", "--filter=blob:none", source, project.commit),
        ("-C", str(unfinished), "checkout", "--quiet", "FETCH_HEAD"),
    ):
        subprocess.run(("git", *arguments), check=True)
    unfinished.rename(folder)


def _edit(folder: Path, recipes: list[Recipe]) -> None:
    for recipe in recipes:
        for edit in recipe.edits:
            path = folder / edit.file
            text = path.read_text()
            if edit.old not in text:
                raise DsplanError(f"{path}: does not hold {edit.old!r}; is it {PROJECTS[recipe.project].commit}?")
            replace_text(path, text.replace(edit.old, edit.new))
    (folder / _EDITED).touch()


def _prepare_nanogpt(directory: Path) -> None:
    """Prepare nanoGPT's data with its own script, which leaves a text alone that is there."""
    folder = directory / "nanogpt/data/shakespeare_char"
    shutil.copy(directory / "data/text.txt", folder / "input.txt")
    subprocess.run((sys.executable, "prepare.py"), cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _prepare_nanochat(directory: Path) -> None:
    """Train nanochat's own tokenizer on the data that stands in the place of its shards."""
    command = (sys.executable, "-m", "scripts.tok_train", "--vocab-size", "512", "--max-chars", "400000")
    own = {"NANOCHAT_BASE_DIR": str(directory / "data/nanochat"), "PYTHONPATH": str(directory / "nanochat")}
    folder = directory / "nanochat"
    subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=True, stdout=subprocess.DEVNULL)


def run(directory: Path, recipe: Recipe, trial: str, killed_under: str = "zero2") -> dict[str, Any]:
    """Return what became of a recipe in one way."""
    folder = _choose_folder(directory, recipe, trial)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    strategy = killed_under if trial == "killed" else trial
    command = [sys.executable, "-m", "dsplan", "run", "--json", "--run-dir", str(folder / "run")]
    command += ["--nproc", str(recipe.ranks)]
    command += [] if strategy == "free" else ["--strategy", strategy]
    command += ["--checkpoint-steps", "2"] if trial == "killed" else []
    script, work = _work(directory, recipe, folder)
    words = {"out": str(folder / "out"), "data": str(directory / "data"), "project": str(directory / recipe.project)}
    (folder / "out").mkdir()
    command += [str(script), *(argument.format(**words) for argument in recipe.arguments)]
    killed = False
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        own = {name: value.format(**words) for name, value in recipe.variables.items()}
        process = subprocess.Popen(
            command, cwd=work, env=_environment(directory, own), stdout=out, stderr=err, start_new_session=True
        )
        try:
            killed = trial == "killed" and _kill_a_rank(process, folder / "run", recipe.ranks - 1)
            process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    outcome = _outcome(folder, process.wait())
    for path in (f"{work}/", f"{directory}/"):  # the line is published, and says nothing of this machine
        outcome["reason"] = outcome["reason"].replace(path, "")
    if trial == "killed":
        outcome["killed_at"] = _KILL_AT if killed else None
        outcome["killed_under"] = killed_under
        undisturbed = _choose_folder(directory, recipe, killed_under)
        outcome["loss_difference"] = _difference(undisturbed, folder, recipe.ranks) if recipe.is_seeded else None
    return outcome


def _choose_folder(directory: Path, recipe: Recipe, trial: str) -> Path:
    name = recipe.name.replace(", ", "-").replace(" ", "-").replace("/", "-")
    return directory / "runs" / f"{name}-{trial}"


def _work(directory: Path, recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    """Prepare the script and the folder that it runs in, where its data are and what it writes stays."""
    script = directory / recipe.project / recipe.script
    work = folder / "work"
    if recipe.inside:
        shutil.copytree(script.parent, work, ignore=shutil.ignore_patterns(".git"))
        return work / script.name, work
    work.mkdir()
    for item in (directory / "data").iterdir():
        (work / item.name).symlink_to(item)
    return script, work


def _environment(directory: Path, own: dict[str, str]) -> dict[str, str]:
    shared = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "hub"),
        "OMP_NUM_THREADS": "1",
        "DSPLAN_HOME": str(directory / "home"),
        "WANDB_MODE": "disabled",
    }
    inherited = [item for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item != str(ROOT)]
    path = os.pathsep.join(filter(None, (str(directory / _ROOMS), own.get("PYTHONPATH"), *inherited)))
    return {**os.environ, **shared, **own, "PYTHONPATH": path}


def _kill_a_rank(process: subprocess.Popen[bytes], run_directory: Path, rank: int) -> bool:
    """Kill a rank once it has done its fourth step; whether that came before the end."""
    metrics = run_directory / f"metrics-rank{rank}.jsonl"
    ends = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        if any(step >= _KILL_AT for step in _steps(metrics)):
            os.kill(int((run_directory / f"rank{rank}.pid").read_text().split()[0]), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


def _steps(metrics: Path) -> dict[int, float | None]:
    """Return the loss of every step of a rank; of a step that was made again, the last one."""
    losses: dict[int, float | None] = {}
    if metrics.exists():
        for line in metrics.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # being written
                continue
            if row.get("event") == "step":
                losses[row["global_step"]] = row.get("loss")
    return losses


def _difference(undisturbed: Path, folder: Path, ranks: int) -> float | None:
    """Return the largest difference of a step's loss from the undisturbed run of the same strategy, where known."""
    differences: list[float] = []
    for rank in range(ranks):
        ours = _steps(folder / "run" / f"metrics-rank{rank}.jsonl")
        theirs = _steps(undisturbed / "run" / f"metrics-rank{rank}.jsonl")
        if ours.keys() != theirs.keys():
            return None
        pairs = ((ours[step], theirs[step]) for step in ours)
        both = [(mine, other) for mine, other in pairs if mine is not None and other is not None]
        differences += [abs(mine - other) for mine, other in both if math.isfinite(mine - other)]
    return max(differences, default=None)


def _outcome(folder: Path, status: int) -> dict[str, Any]:
    lines = [line for line in (folder / "stderr").read_text().splitlines() if line.startswith(("error:", "dsplan:"))]
    try:
        report = json.loads((folder / "stdout").read_text())
    except ValueError:
        return {
            "status": status,
            "outcome": "refused" if status == _REFUSED else "failed",
            "reason": lines[-1] if lines else "",
        }
    plan, measured = report.get("plan") or {}, report.get("measured") or {}
    attempts = report.get("attempts") or []
    return {
        "status": status,
        "outcome": "refused" if status == _REFUSED else report["outcome"],
        "reason": report["reason"],
        "strategy": (plan.get("plan") or {}).get("strategy"),
        "backend": (plan.get("plan") or {}).get("backend"),
        "steps": measured.get("steps"),
        "first_loss": measured.get("first_loss"),
        "last_loss": measured.get("last_loss"),
        "predicted_bytes": (plan.get("memory") or {}).get("peak_allocated_bytes"),
        "measured_bytes": measured.get("peak_allocated_bytes"),
        "predicted_seconds": (plan.get("time") or {}).get("step_seconds"),
        "measured_seconds": measured.get("step_seconds"),
        "restarts": max(len(attempts) - 1, 0),
        "resumed_at": attempts[-1]["first_step"] if len(attempts) > 1 else None,
    }


@contextmanager
def _results(directory: Path) -> Iterator[dict[str, Any]]:
    """Keep the results as they stand, written when changed; several runs of this program may take turns."""
    with (directory / "results.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scripts": {}}
        results["versions"] = {name: version(name) for name in LIBRARIES}
        yield results
        replace_text(RESULTS, json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fetch", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mirrors", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    directory = options.directory.absolute()
    if options.what == "fetch":
        fetch(directory, options.mirrors)
        return
    for room in ("dsplan", "planner", "strategies", "hardware_db"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, directory / _ROOMS / room, dirs_exist_ok=True, ignore=leave)
    chosen = [recipe for recipe in RECIPES if not options.only or any(word in recipe.name for word in options.only)]
    for recipe in chosen:
        for trial in options.ways:
            with _results(directory) as results:
                zero2 = results["scripts"].get(recipe.name, {}).get("zero2", {})
            outcome = run(directory, recipe, trial, "zero2" if zero2.get("outcome") == "completed" else "free")
            print(f"{recipe.name} {trial}: {json.dumps(outcome)}", flush=True)
            with _results(directory) as results:
                results["scripts"].setdefault(recipe.name, {})[trial] = outcome


if __name__ == "__main__":
    main()
