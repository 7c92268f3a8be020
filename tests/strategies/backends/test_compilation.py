"""Notices and refusals before DeepSpeed compiles an operator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strategies.backends.deepspeed.engine import expect_compilation
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun


def environment(*, nodes: int = 1) -> Environment:
    device = torch.device("cpu")
    return Environment(rank=0, local_rank=0, world_size=2 * nodes, local_world_size=2, device=device)


def test_a_lock_that_nobody_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    expect_compilation("cpu_adam", environment())
    assert "DeepSpeed compiles cpu_adam before the first step, once" in capsys.readouterr().err
    lock = next(tmp_path.rglob("cpu_adam")) / "lock"
    lock.touch()
    with pytest.raises(CannotRun, match=r"cpu_adam/lock is left of a run that was ended .*; remove it"):
        expect_compilation("cpu_adam", environment())
    expect_compilation("cpu_adam", environment(nodes=2))  # a process of another node may hold it
    with open(lock):  # as torch holds the lock of a compilation that is under way
        expect_compilation("cpu_adam", environment())
    lock.unlink()
    capsys.readouterr()
    lock.with_name("cpu_adam.so").touch()
    expect_compilation("cpu_adam", environment())
    assert capsys.readouterr().err == ""
