"""Runs of one rank, some steps of which are profiled."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from strategies.run_directory.files import profiles_in
from strategies.telemetry.monitor import RunMonitor
from strategies.variables import PROFILE

WIDTH = 64


def profile_on_card(directory: Path) -> tuple[list[str], str]:
    """The files that the profile leaves, and what was written to standard error meanwhile, by C++ too."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        os.environ[PROFILE] = "3:4"
        try:
            train(directory, 6, torch.device("cuda", 0))
        finally:
            del os.environ[PROFILE]
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        written.seek(0)
        text = written.read().decode()
    return [path.name for paths in profiles_in(directory).values() for path in paths], text


def train(directory: Path, steps: int, device: torch.device) -> None:
    """A run of one rank, watched as `dsplan run` watches it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = RunMonitor(directory, rank=0, device=device, sequence_length=0)
    monitor.training_starts()
    for _ in range(steps):
        batch = torch.randn(8, WIDTH, device=device)
        monitor.forward_starts(model, ((batch,), {}))
        loss = model(batch).square().mean()
        monitor.loss_is(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step_ended()
    monitor.close()
