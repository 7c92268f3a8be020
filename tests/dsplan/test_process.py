"""Whole processes: what is imported, on which terminals it prints, how it ends."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECOMMEND = ("recommend", "--model", "opt-6.7b", "--gpus", "8")

# What an environment with the base dependencies alone would do: these packages are not there.
WITHOUT = """
import importlib.abc, sys
there = set(sys.modules) - {{"__main__"}}  # of the interpreter's start, which is not dsplan's doing
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test")
sys.meta_path.insert(0, Blocker())
from dsplan.__main__ import main
status = main({arguments})
print(sorted(set(sys.modules) - there), file=sys.stderr)
sys.exit(status)
"""
TRAINING = {"torch", "numpy", "transformers", "accelerate", "deepspeed", "psutil", "safetensors"}
PAGES = {"gradio", "fastapi", "uvicorn", "plotly", "pandas"}
TYPER = {"typer", "click", "shellingham", "annotated_doc", "typing_extensions"}
TRACKERS = {"tensorboard", "wandb", "mlflow", "trackio"}


def run(*arguments: str, blocked: frozenset[str] = frozenset(), **environment: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(blocked=set(blocked) or "()", arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        RECOMMEND,
        ("recommend", "--model", "llama-2-70b", "--gpus", "1024", "--gpu", "H100", "--all-plans", "--json"),
        ("estimate", "--model", "bert-large", "--gpus", "1", "--gpu", "A100-SXM4-80GB"),
        ("models", "opt"),
        ("devices", "a100"),
        ("probe",),
        ("--help",),
    ],
)
@pytest.mark.sweep(every=3)
def test_planning_works_with_the_base_dependencies_alone(arguments: tuple[str, ...]) -> None:
    finished = run(*arguments, blocked=frozenset(TRAINING | PAGES | TRACKERS | {"pydantic"}))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout
    assert not (TRAINING | PAGES | TRACKERS) & imported(finished)


@pytest.mark.parametrize("arguments", [RECOMMEND, ("--help",), ("--version",), ("recommend", "--help")])
def test_a_plan_imports_nothing_of_pages_trackers_and_training_that_are_installed(arguments: tuple[str, ...]) -> None:
    slow = {"torch", "numpy", "accelerate", "rich", "dsplan.ui", "dsplan.report", "dsplan.diagnostics"}
    assert not (PAGES | TRACKERS | slow) & imported(run(*arguments))


def imported(finished: subprocess.CompletedProcess[str]) -> set[str]:
    return set(ast.literal_eval(finished.stderr.splitlines()[-1]))


@pytest.mark.parametrize("missing", ["uvicorn", "gradio"])
def test_a_missing_extra_is_named_in_one_line(missing: str) -> None:
    finished = run("ui", blocked=frozenset({missing}))
    assert finished.returncode == 2
    message = finished.stderr.splitlines()[0]
    assert missing in message
    assert message.endswith("; pip install 'dsplan[ui]'")


def test_a_piped_answer_needs_no_rich() -> None:
    finished = run(*RECOMMEND, blocked=frozenset({"rich"}))
    assert finished.returncode == 0, finished.stderr
    assert "rich" not in ast.literal_eval(finished.stderr)


def test_recommend_stays_within_its_import_budget() -> None:
    """Modules, as many on every machine; `scripts/bench/startup.py` has the seconds, beside those of Accelerate."""
    modules = imported(run(*RECOMMEND))
    own = {name for name in modules if name.partition(".")[0] in ("dsplan", "planner", "strategies", "hardware_db")}
    foreign = {name for name in modules - own if name.partition(".")[0] not in sys.stdlib_module_names}
    assert len(own) < 140
    assert len(modules) - len(own) - len(foreign) < 220  # of Python's own
    assert {name.partition(".")[0] for name in foreign} <= {"__main__", *TYPER}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
@pytest.mark.sweep(every=2, suite=lambda encoding: encoding in ("ascii", "cp437"))
def test_any_encoding_prints(encoding: str) -> None:
    for arguments in (RECOMMEND, ("models",), ("devices", "--nodes"), ("probe",)):
        assert run(*arguments, PYTHONIOENCODING=encoding).returncode == 0


def test_a_reader_that_leaves_early_is_no_error() -> None:
    finished = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m dsplan models --json | head -n 1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert finished.stdout == "[\n"
    assert finished.stderr == ""
