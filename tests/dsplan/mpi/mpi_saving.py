"""Bodies that three ranks run: what they save is loaded again, here and (`mpi_loading`) on other numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from dsplan import DsplanError
from dsplan.mpi import CheckpointManager, Part
from tests.dsplan.mpi.mpi_trees import STEP, same, trained, tree_of, whole_matrix


def a_state_for_other_numbers_of_ranks(comm: MPI.Intracomm, directory: Path) -> None:
    for stage in (1, 2, 3):
        optimizer, model = trained(comm, stage, 3)
        columns = slice(2 * comm.rank, 2 * comm.rank + 2)
        state = {
            "model": model,
            "optimizer": optimizer.state(),
            "columns": Part(
                values=whole_matrix(comm.size)[:, columns].copy(), shape=(4, 2 * comm.size), start=(0, columns.start)
            ),
            "stages": {f"stage {comm.rank}": np.full(3, comm.rank)},
            "progress": {"epoch": 2, "name": "run", "nothing": None, "done": False, 3: (1.5, [])},
        }
        path = CheckpointManager(comm, directory / f"stage-{stage}").save_checkpoint(state, step=STEP)
        assert path.name == "step-00001000"


def as_many_ranks_get_their_own(comm: MPI.Intracomm, directory: Path) -> None:
    checkpoints = CheckpointManager(comm, directory / "own")
    state = {
        "random": np.random.default_rng(comm.rank).integers(9, size=5),
        "rank": comm.rank,
        "tree": tree_of(comm.rank),
    }
    checkpoints.save_checkpoint(state, step=1)
    assert same(checkpoints.load_checkpoint(step=1), state)
    loaded = checkpoints.load_checkpoint()
    assert isinstance(loaded["tree"]["pair"], tuple)
    assert isinstance(loaded["tree"][7], np.float32)


def shared_values_are_written_once_by_all_in_turn(comm: MPI.Intracomm, directory: Path) -> None:
    arrays = {f"layer{index}": np.full(1000, float(index)) for index in range(6)}
    path = CheckpointManager(comm, directory / "shared").save_checkpoint(arrays, step=1)
    sizes = [file.stat().st_size for file in sorted(path.glob("rank-*"))]
    assert len(sizes) == comm.size
    assert sum(sizes) == pytest.approx(48_000, rel=0.05)
    assert max(sizes) < 1.1 * 48_000 / comm.size


def other_libraries_read_the_files(comm: MPI.Intracomm, directory: Path) -> None:
    from safetensors.numpy import load_file

    path = CheckpointManager(comm, directory / "read").save_checkpoint(
        {"a": np.arange(5), "b": np.float16([1.5])}, step=1
    )
    tensors = {key: value for file in path.glob("rank-*") for key, value in load_file(file).items()}
    assert sorted(tensors) == ["a", "b"]
    np.testing.assert_array_equal(tensors["a"], np.arange(5))
    assert tensors["b"].dtype == np.float16


def every_dtype_comes_back(comm: MPI.Intracomm, directory: Path) -> None:
    words = ("f8", "f4", "f2", "c8", "c16", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ">f4")
    state = {word: (np.arange(7) % 3).astype(word) for word in words} | {
        "none": np.zeros((0, 3)),
        "point": np.array(2.5),
    }
    checkpoints = CheckpointManager(comm, directory / "dtypes")
    checkpoints.save_checkpoint(state, step=1)
    loaded = checkpoints.load_checkpoint(1)
    for name, value in state.items():
        np.testing.assert_array_equal(loaded[name], value)
        assert loaded[name].shape == value.shape
        assert loaded[name].dtype == value.dtype.newbyteorder("=")


def the_newest_stay(comm: MPI.Intracomm, directory: Path) -> None:
    checkpoints = CheckpointManager(comm, directory / "newest", keep_last=2)
    assert (checkpoints.steps(), checkpoints.latest_step()) == ([], None)
    for step in (5, 10, 15, 10):
        checkpoints.save_checkpoint({"step": step, "when": step}, step=step)
    comm.Barrier()
    assert checkpoints.steps() == [10, 15]
    assert checkpoints.load_checkpoint()["step"] == 10
    with pytest.raises(DsplanError, match="has no checkpoint of step 5; there are: 10, 15"):
        checkpoints.load_checkpoint(5)
    with pytest.raises(DsplanError, match="keep_last=0 keeps no checkpoint"):
        CheckpointManager(comm, directory, keep_last=0)


def what_cannot_be_saved_is_refused(comm: MPI.Intracomm, directory: Path) -> None:
    checkpoints = CheckpointManager(comm, directory / "refused")
    with pytest.raises(DsplanError, match="'x' is of type set; a checkpoint holds arrays"):
        checkpoints.save_checkpoint({"x": {1} if comm.rank == 1 else 1}, step=1)
    with pytest.raises(DsplanError, match="step is -1"):
        checkpoints.save_checkpoint({}, step=-1)
    with pytest.raises(DsplanError, match="ranks differ: rank 0 has step 0"):
        checkpoints.save_checkpoint({}, step=comm.rank)
    with pytest.raises(DsplanError, match=rf"parts of 'p' hold {2 * comm.size} elements of 100"):
        checkpoints.save_checkpoint({"p": Part(values=np.zeros(2), shape=(100,), start=2 * comm.rank)}, step=1)
    with pytest.raises(DsplanError, match="hold different values of one part of 'p'"):
        checkpoints.save_checkpoint({"p": Part(values=np.full(2, comm.rank), shape=(2,), start=0)}, step=1)
    with pytest.raises(DsplanError, match="lies outside of an array of shape"):
        Part(values=np.zeros(3), shape=(2,), start=0)
    assert not list((directory / "refused").glob("*"))


def a_rank_that_cannot_write_ends_the_save_on_all(comm: MPI.Intracomm, directory: Path) -> None:
    """The checkpoint that was there stays, and nothing half-written does."""
    checkpoints = CheckpointManager(comm, directory / "full")
    checkpoints.save_checkpoint({"own": np.full(3, comm.rank)}, step=1)
    from dsplan.mpi import files

    write = files.write

    def full(path: Path, arrays: Any) -> None:
        write(path, arrays)
        raise OSError(28, "No space left on device")

    if comm.rank == 1:
        files.write = full
    with pytest.raises(DsplanError, match=r"cannot be used .No space left on device.; make room"):
        checkpoints.save_checkpoint({"own": np.full(3, 10 + comm.rank)}, step=2)
    files.write = write
    comm.Barrier()
    assert sorted(file.name for file in (directory / "full").iterdir()) == ["latest", "step-00000001"]
    assert checkpoints.load_checkpoint()["own"][0] == comm.rank


def damage_is_noticed(comm: MPI.Intracomm, directory: Path) -> None:
    checkpoints = CheckpointManager(comm, directory / "damaged")
    path = checkpoints.save_checkpoint({"w": np.arange(100.0)}, step=1)
    file = path / "rank-00000.safetensors"
    good = file.read_bytes()
    comm.Barrier()
    for damaged in (good[:-8], good[:-1] + b"\x7f", b"", b"\xff" * 64):
        if comm.rank == 0:
            file.write_bytes(damaged)
        comm.Barrier()
        with pytest.raises(DsplanError, match=r"rank-00000.safetensors: (is damaged|'w' does not hold what was saved)"):
            checkpoints.load_checkpoint(1)
    if comm.rank == 0:
        (path / "index.json").write_text("{")
    comm.Barrier()
    with pytest.raises(DsplanError, match=r"index.json: is damaged: it is not JSON"):
        checkpoints.load_checkpoint(1)


def an_array_that_stays(comm: MPI.Intracomm, directory: Path) -> None:
    CheckpointManager(comm, directory / "undamaged").save_checkpoint({"w": np.arange(100.0)}, step=1)


def nothing_is_pickled(comm: MPI.Intracomm, directory: Path) -> None:
    path = CheckpointManager(comm, directory / "plain").save_checkpoint({"w": np.arange(3)}, step=1)
    assert sorted(file.suffix for file in path.iterdir()) == [".json", ".safetensors"]
    assert json.loads((path / "index.json").read_text())["world_size"] == comm.size
