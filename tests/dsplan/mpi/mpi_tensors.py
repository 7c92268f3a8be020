"""Bodies: the library's classes on torch tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from dsplan.mpi import CheckpointManager, GradientManager, ZeROOptimizer, ZeROStage

RATE = 1e-2


def tensors_come_back_as_tensors(comm: MPI.Intracomm) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        given = torch.nn.Parameter(torch.full((3, 2), float(comm.rank), dtype=dtype))
        average = GradientManager(comm).average_gradients([given])[0]
        assert average.dtype == dtype
        assert average.shape == (3, 2)
        torch.testing.assert_close(average, torch.full((3, 2), (comm.size - 1) / 2, dtype=dtype))


def torch_parameters_are_stepped(comm: MPI.Intracomm) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        torch.manual_seed(0)
        model, twin = torch.nn.Linear(5, 3, dtype=dtype), torch.nn.Linear(5, 3)
        twin.load_state_dict(model.state_dict())
        inputs = torch.randn(comm.size, 5)
        reference = torch.optim.Adam(twin.parameters(), lr=RATE)
        optimizer = ZeROOptimizer(comm, ZeROStage.STAGE_2, RATE)
        parameters = dict(model.named_parameters())
        optimizer.register_parameters(parameters)
        for _ in range(3):
            model.zero_grad()
            model(inputs[comm.rank : comm.rank + 1].to(dtype)).square().sum().backward()
            reduced = optimizer.reduce_gradients({name: weight.grad for name, weight in parameters.items()})
            optimizer.step(parameters, reduced, in_place=True)
            twin.zero_grad()
            (twin(inputs).square().sum() / comm.size).backward()
            reference.step()
        for name, weight in twin.named_parameters():
            assert isinstance(parameters[name], torch.nn.Parameter)
            torch.testing.assert_close(parameters[name].float(), weight, rtol=tolerance, atol=tolerance)


def tensors_are_saved_and_loaded(comm: MPI.Intracomm, directory: Path) -> None:
    checkpoints = CheckpointManager(comm, directory)
    torch.manual_seed(0)
    for step, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)):
        given = {"t": (torch.randn(4, 3) * 3).to(dtype).T}
        checkpoints.save_checkpoint(given, step=step)
        loaded = checkpoints.load_checkpoint(step)["t"]
        assert loaded.dtype == (np.float32 if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))
        restored = checkpoints.load_checkpoint(step, like={"t": torch.zeros(3, 4, dtype=dtype)})["t"]
        assert restored.dtype == dtype
        assert torch.equal(restored, given["t"])
