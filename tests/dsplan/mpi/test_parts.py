"""The parts of dsplan.mpi before and after MPI: buckets, trees, files, and what it says where MPI is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsplan import DsplanError
from dsplan.mpi import SGD, AdamW, ModelParallelConfig, Part, files
from dsplan.mpi.arrays import leaves, rebuilt, subtree
from dsplan.mpi.buckets import bounds, checked_bucket_bytes, divided_buckets, whole_buckets

ROOT = Path(__file__).parents[3]
FLOAT = np.dtype(np.float32)
counts = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(counts=counts, limit=st.integers(4, 200))
@settings(deadline=None)
def test_whole_buckets_hold_every_element_once_and_stay_within_the_limit(counts: list[int], limit: int) -> None:
    dtypes = [FLOAT if index % 2 else np.dtype(np.float64) for index in range(len(counts))]
    leaves_now = {leaf: np.arange(count) + 1000 * leaf for leaf, count in enumerate(counts)}
    out = [np.full(count, -1) for count in counts]
    for bucket in whole_buckets(counts, dtypes, limit):
        assert bucket.count * bucket.dtype.itemsize <= max(limit, bucket.dtype.itemsize)
        assert {dtypes[run.leaf] for run in bucket.runs} == {bucket.dtype}
        bucket.spread(bucket.filled(leaves_now), out)
    assert all(np.array_equal(values, leaves_now[leaf]) for leaf, values in enumerate(out))


@given(counts=counts, limit=st.integers(4, 200), ranks=st.integers(1, 5))
@settings(deadline=None)
def test_divided_buckets_hold_each_ranks_elements_together(counts: list[int], limit: int, ranks: int) -> None:
    owned = [[np.zeros(count, dtype=int) for count in counts] for _ in range(ranks)]
    for bucket in divided_buckets(counts, [FLOAT] * len(counts), limit, ranks):
        assert len(bucket.counts) == ranks
        for rank in range(ranks):
            runs = list(bucket.runs_of(rank))
            assert sum(run.stop - run.start for run in runs) == bucket.counts[rank]
            for run in runs:
                owned[rank][run.leaf][run.start : run.stop] += 1
    for rank in range(ranks):
        for leaf, count in enumerate(counts):
            start, stop = bounds(count, ranks, rank)
            assert owned[rank][leaf][start:stop].tolist() == [1] * (stop - start)
            assert owned[rank][leaf].sum() == stop - start


def test_a_bucket_size_that_mpi_cannot_count_is_refused() -> None:
    with pytest.raises(DsplanError, match="bucket_bytes is 2147483648; it must be from 1024 to"):
        checked_bucket_bytes(1 << 31)


def test_leaves_come_in_one_order_and_go_back_to_theirs() -> None:
    tree = {"b": [1.0, (2.0,)], "a": {3: None, "x": 4.0}}
    by_path = leaves(tree)
    assert list(by_path) == [("a", 3), ("a", "x"), ("b", 0), ("b", 1, 0)]
    assert rebuilt(tree, by_path.__getitem__) == tree
    assert list(rebuilt(tree, by_path.__getitem__)) == ["b", "a"]
    assert subtree(tree, ("b", 1)) == (2.0,)


def test_keys_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(DsplanError, match=r"the keys 1 and '1' read the same"):
        leaves({1: 0.0, "1": 0.0})
    with pytest.raises(DsplanError, match=r"a: the key \(1, 2\) is neither a text nor a whole number"):
        leaves({"a": {(1, 2): 0.0}})


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 2.0, 1), (True, 1, 1), (1, 1, -1)])
def test_sizes_are_whole_numbers_above_zero(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(DsplanError, match=r"_size is .*; it must be a whole number of at least 1"):
        ModelParallelConfig(*sizes)


def test_every_rank_has_one_place() -> None:
    config = ModelParallelConfig(2, 3, 4)
    places = [config.coordinates(rank) for rank in range(config.world_size)]
    assert len(set(places)) == 24
    assert (places[1].model, places[2].data, places[6].pipeline) == (1, 1, 1)
    with pytest.raises(DsplanError, match="ranks are 0 to 23"):
        config.coordinates(24)


def test_rules_refuse_what_is_no_rate() -> None:
    with pytest.raises(DsplanError, match=r"betas are \(0.9, 1.0\)"):
        AdamW(betas=(0.9, 1.0))
    with pytest.raises(DsplanError, match="momentum is nan"):
        SGD(momentum=float("nan"))


def test_a_box_of_a_matrix_lies_where_it_says() -> None:
    whole = np.zeros((4, 6))
    part = Part(values=np.ones((2, 3)), shape=(4, 6), start=(1, 3))
    part.region.copy_to(whole, part.values)
    assert whole[1:3, 3:].sum() == whole.sum() == 6
    run = Part(values=np.ones(3), shape=(4, 6), start=21)
    run.region.copy_to(whole, run.values)
    assert (whole[3, 3:] == 1).all()


def test_the_safetensors_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.array([True, False]), "c": np.array(2.5)}
    stored = [
        files.FileArray(key=key, word=value.dtype.name, shape=value.shape, values=lambda value=value: value)
        for key, value in arrays.items()
    ]
    files.write(tmp_path / "mine.safetensors", stored)
    loaded = safetensors.load_file(tmp_path / "mine.safetensors")
    for key, value in arrays.items():
        np.testing.assert_array_equal(loaded[key], value)
        assert loaded[key].dtype == value.dtype
    safetensors.save_file(arrays, tmp_path / "theirs.safetensors")
    for key, value in arrays.items():
        digest = files.digest_of(files.bytes_of(value, value.dtype.name))
        entry = files.header(tmp_path, "theirs.safetensors")[key]
        read = files.read(tmp_path / "theirs.safetensors", key, entry, value.dtype.name, digest)
        np.testing.assert_array_equal(read, value.reshape(-1))


def _python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    return finished.stderr.strip().splitlines()[-1]


def test_without_mpi4py_numpy_or_an_mpi_library_one_line_says_what_to_install() -> None:
    hide = "import sys; sys.modules[{!r}] = None; from dsplan.mpi import GradientManager; GradientManager()"
    assert _python(hide.format("mpi4py")).endswith("dsplan.mpi needs mpi4py; pip install 'dsplan[mpi]'")
    assert _python(hide.format("numpy")).endswith("dsplan.mpi needs numpy and mpi4py; pip install 'dsplan[mpi]'")
    pytest.importorskip("mpi4py")
    code = "from dsplan.mpi import GradientManager; GradientManager()"
    assert _python(code, MPI4PY_LIBMPI="/nowhere/libmpi.so").endswith("; install Open MPI or MPICH")


def test_the_library_needs_no_torch() -> None:
    code = "import sys, dsplan.mpi; print('torch' in sys.modules, 'mpi4py' in sys.modules, file=sys.stderr)"
    assert _python(code) == "False False"
