"""Remarks that hold for a whole answer are shown with it, in every form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsplan.cli import Cli

HARDWARE = "--gpus 2 --gpu A100-SXM4-80GB"
MODULE = """
from torch import nn


def make():
    return nn.Sequential(nn.Embedding(100, 64), *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
"""


@pytest.mark.parametrize("command", ["recommend", "estimate"])
def test_a_limit_above_the_card_is_said_to_change_nothing(cli: Cli, command: str) -> None:
    line = f"{command} --model opt-125m {HARDWARE} --seq-len 512 --max-memory-gb"
    note = "note: --max-memory-gb 100 is more than the 79.2 GiB usable on one A100-SXM4-80GB, which stay the limit"
    assert note in cli(line, 100).out
    assert "--max-memory-gb 100" in str(cli(f"{line} 100 --json").json)
    assert "note: --max-memory-gb" not in cli(line, 40).out


@pytest.mark.parametrize("command", ["recommend", "estimate"])
def test_a_rule_of_thumb_is_said_to_be_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "front_notes_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    printed = cli(f"{command} --model front_notes_module:make {HARDWARE} --seq-len 16")
    assert "note: activations are a rule of thumb from front_notes_module:make's parameters" in printed.out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3"])
def test_a_module_without_repeated_blocks_has_all_phases(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    (tmp_path / "front_notes_mlp.py").write_text(
        "from torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    memory = cli(f"estimate --model front_notes_mlp:make {HARDWARE} --seq-len 1 --strategy {strategy} --json").json[
        "memory"
    ]
    assert list(memory["phases"]) == ["load", "forward", "loss", "backward", "step"]
    # Weights of this size in fp32, or in bf16 with an fp32 master copy, spread over two GPUs at most.
    assert memory["states"]["parameters_bytes"] + memory["states"]["optimizer_bytes"] >= 12 * 19210 // 2
