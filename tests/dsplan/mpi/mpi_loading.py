"""Bodies that load what three ranks of `mpi_saving` saved; they run on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from dsplan import DsplanError
from dsplan.mpi import CheckpointManager, Part, ZeROOptimizer
from tests.dsplan.mpi.mpi_trees import STEP, gradients, parameters, trained, whole_matrix

SAVED_BY = 3


def training_goes_on_under_every_stage(comm: MPI.Intracomm, directory: Path) -> None:
    """Three steps on three ranks and three here are six steps in one go."""
    _, expected = trained(comm, 1, 6)
    for saved_stage in (1, 2, 3):
        for stage in (1, 2, 3):
            state = CheckpointManager(comm, directory / f"stage-{saved_stage}").load_checkpoint(STEP)
            optimizer = ZeROOptimizer(comm, stage, 1e-2)
            model = state["model"]
            optimizer.register_parameters(model)
            optimizer.load_state(state["optimizer"])
            for step in range(3, 6):
                model = optimizer.step(model, optimizer.reduce_gradients(gradients(step)))
            for name in parameters():
                assert model[name].dtype == expected[name].dtype
                np.testing.assert_allclose(
                    model[name], expected[name], rtol=1e-6, atol=1e-3 if name == "half" else 1e-7
                )


def a_rank_can_read_its_parts_alone(comm: MPI.Intracomm, directory: Path) -> None:
    optimizer = ZeROOptimizer(comm, 2, 1e-2)
    optimizer.register_parameters(parameters())
    checkpoints = CheckpointManager(comm, directory / "stage-2")
    whole = checkpoints.load_checkpoint(STEP)["optimizer"]["parameters"]
    mine = checkpoints.load_checkpoint(STEP, like={"optimizer": optimizer.state()})["optimizer"]
    part = mine["parameters"]["w"]["exp_avg"]
    assert isinstance(part, Part)
    assert part.values.size in (35 // comm.size, 35 // comm.size + 1)
    np.testing.assert_array_equal(
        part.values, whole["w"]["exp_avg"].reshape(-1)[part.start : part.start + part.values.size]
    )
    optimizer.load_state(mine)
    assert optimizer.state()["parameters"]["w"]["step"] == 3


def parts_and_names_of_all_ranks_come_together(comm: MPI.Intracomm, directory: Path) -> None:
    state = CheckpointManager(comm, directory / "stage-1").load_checkpoint()
    np.testing.assert_array_equal(state["columns"], whole_matrix(SAVED_BY))
    assert sorted(state["stages"]) == ["stage 0", "stage 1", "stage 2"]
    assert (state["stages"]["stage 2"] == 2).all()
    assert state["progress"] == {"epoch": 2, "name": "run", "nothing": None, "done": False, 3: (1.5, [])}
    rows = Part(values=np.zeros((1, 6), np.float32), shape=(4, 6), start=(comm.rank, 0))
    loaded = CheckpointManager(comm, directory / "stage-1").load_checkpoint(like={"columns": rows})
    np.testing.assert_array_equal(loaded["columns"].values, whole_matrix(SAVED_BY)[comm.rank : comm.rank + 1])
    assert loaded["columns"].values.dtype == np.float32


def what_was_different_on_each_rank_is_refused(comm: MPI.Intracomm, directory: Path) -> None:
    checkpoints = CheckpointManager(comm, directory / "own")
    with pytest.raises(
        DsplanError, match=rf"3 ranks that saved .* different values of 'ra.*and there are {comm.size} ranks now"
    ):
        checkpoints.load_checkpoint(1)
    with pytest.raises(DsplanError, match="has no 'other'"):
        checkpoints.load_checkpoint(1, like={"other": np.zeros(3)})
    with pytest.raises(DsplanError, match=r"'w' has shape \[2\], in .* it is of shape \[100\]"):
        CheckpointManager(comm, directory / "undamaged").load_checkpoint(1, like={"w": np.zeros(2)})


def another_rule_is_refused(comm: MPI.Intracomm, directory: Path) -> None:
    state = CheckpointManager(comm, directory / "stage-1").load_checkpoint()["optimizer"]
    optimizer = ZeROOptimizer(comm, 1, 1e-2)
    with pytest.raises(DsplanError, match="call register_parameters first"):
        optimizer.load_state(state)
    optimizer.register_parameters(parameters())
    with pytest.raises(DsplanError, match="rule is 'sgd', this optimizer's 'adamw'"):
        optimizer.load_state({**state, "rule": "sgd"})
    with pytest.raises(DsplanError, match="do not share 'half'"):
        optimizer.load_state({"rule": "adamw", "parameters": {"w": state["parameters"]["w"]}})
