"""Divided layers, recomputing and the trainer of dsplan.mpi: on threads everywhere, and under mpirun where it is."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from dsplan.mpi import ParallelTrainer, communicator
from tests.dsplan.mpi import mpi_parallel, thread_mpi
from tests.dsplan.mpi.mpi_start import bodies, needs_mpi, outcomes


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("body", bodies("mpi_parallel"))
def test_on_threads(body: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "mpi", lambda: thread_mpi.MPI)
    function = getattr(mpi_parallel, body)
    takes_directory = len(inspect.signature(function).parameters) == 2
    thread_mpi.run(partial(function, directory=tmp_path) if takes_directory else function, ranks)


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", bodies("mpi_parallel"))
def test_under_mpirun(body: str, ranks: int) -> None:
    assert outcomes("mpi_parallel", ranks)[body] == []


class Regression(nn.Module):
    """A torch module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.line(x), y)


def test_a_torch_module_is_trained_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "mpi", lambda: thread_mpi.MPI)

    def body(comm: thread_mpi.Intracomm) -> None:
        model = Regression()
        x = torch.eye(3)
        with ParallelTrainer(comm=comm, learning_rate=0.1) as trainer:  # type: ignore[arg-type]
            losses = trainer.train(model, [(x, x.sum(1, keepdim=True))] * 8, epochs=5)
        assert losses[-1] < losses[0] / 5

    thread_mpi.run(body, 1)
