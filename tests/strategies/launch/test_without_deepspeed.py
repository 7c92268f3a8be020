"""Without DeepSpeed everything but its backend is the same: plans, configs, and losses of ZeRO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.launch.command import EXAMPLES, ROOT

Dsplan = Callable[..., Any]
CLUSTER = ("--gpus", "8", "--gpu", "A100-80GB")
SHORT = ("--steps", "3", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence-length", "32")


def _python(*arguments: str | Path, hides: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*([hides] if hides else []), ROOT)))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture
def hiding(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, makes Python and its children find no DeepSpeed."""
    folder = tmp_path / "hiding"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["deepspeed"] = None\n')
    return folder


@pytest.fixture
def with_and_without(hiding: Path) -> Dsplan:
    """Runs a command twice and gives both answers, which must be JSON."""

    def run(*arguments: str | Path) -> tuple[Any, Any]:
        answers = []
        for hides in (None, hiding):
            finished = _python("-m", "dsplan", arguments[0], "--json", *arguments[1:], hides=hides)
            assert finished.returncode == 0, finished.stderr
            answers.append(json.loads(finished.stdout))
        return answers[0], answers[1]

    return run


def test_the_tests_really_hide_it(hiding: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('deepspeed')); import deepspeed"
    finished = _python("-c", code, hides=hiding)
    assert finished.stdout == "None\n"
    assert "ModuleNotFoundError" in finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend", "--model", "gpt2-xl", *CLUSTER),
        ("recommend", "--model", "gpt2-xl", *CLUSTER, "--max-memory-gb", "8"),
        ("estimate", "--model", "gpt2", *CLUSTER, "--strategy", "zero3", "--backend", "deepspeed"),
        ("estimate", "--model", "gpt2", *CLUSTER, "--strategy", "zero3", "--backend", "native"),
    ],
    ids=["recommend", "recommend in little memory", "estimate deepspeed", "estimate native"],
)
@pytest.mark.sweep(every=2)
def test_plans_are_the_same(arguments: tuple[str, ...], with_and_without: Dsplan) -> None:
    answer, without = with_and_without(*arguments)
    assert answer == without


def test_written_configs_are_the_same(hiding: Path, tmp_path: Path) -> None:
    written = []
    for hides in (None, hiding):
        folder = tmp_path / ("without" if hides else "with")
        limits = ("--max-memory-gb", "8", "--out", folder)
        finished = _python("-m", "dsplan", "recommend", "--model", "gpt2-xl", *CLUSTER, *limits, hides=hides)
        assert finished.returncode == 0, finished.stderr
        written.append({path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()})
    assert written[0] == written[1]
    assert any("zero_optimization" in text for text in written[0].values())


@pytest.mark.slow
def test_zero_trains_with_the_same_losses(with_and_without: Dsplan) -> None:
    pytest.importorskip("deepspeed")
    document, without = with_and_without("run", "--strategy", "zero2", EXAMPLES / "train_gpt.py", *SHORT)
    assert document["plan"]["plan"]["backend"] == "deepspeed"
    assert without["plan"]["plan"]["backend"] == "native"
    for which in ("first_loss", "last_loss"):
        assert without["measured"][which] == pytest.approx(document["measured"][which], rel=1e-4)
    assert without["measured"]["last_loss"] < without["measured"]["first_loss"]


@pytest.mark.slow
def test_its_own_backend_is_refused_in_one_line(hiding: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import dsplan\nfrom torch import nn\n"
        "dsplan.initialize(nn.Sequential(nn.Linear(4, 4)), strategy='zero2', backend='deepspeed',"
        " config={'train_batch_size': 4})\n"
    )
    finished = _python("-m", "dsplan", "run", "--nproc", "1", script, hides=hiding)
    assert finished.returncode != 0
    assert "pip install dsplan[deepspeed]" in finished.stdout + finished.stderr
    assert "backend 'native'" in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
