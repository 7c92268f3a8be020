"""Bodies: GradientManager and ModelParallelConfig against numpy, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from dsplan import DsplanError
from dsplan.mpi import GradientManager, ModelParallelConfig, PerformanceMonitor
from strategies.distributed.launcher_env import read_own_variables
from tests.dsplan.mpi.mpi_trees import same, tree_of


def _mean(trees: list[Any]) -> Any:
    return np.mean([np.asarray(tree, dtype=np.float64) for tree in trees], axis=0)


def average_is_numpys(comm: MPI.Intracomm) -> None:
    for bucket_bytes in (1 << 10, 8 << 20):
        average = GradientManager(comm, bucket_bytes=bucket_bytes).average_gradients(tree_of(comm.rank))
        everyone = [tree_of(rank) for rank in range(comm.size)]
        for name, tolerance in (("w", 1e-6), ("half", 1e-3), ("double", 1e-14), ("empty", 0.0), ("transposed", 1e-6)):
            expected = _mean([tree["layers"][0][name] for tree in everyone])
            mean = average["layers"][0][name]
            assert mean.dtype == everyone[0]["layers"][0][name].dtype
            np.testing.assert_allclose(mean.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
        assert isinstance(average["layers"], list)
        assert isinstance(average["pair"], tuple)
        assert average["pair"][0] == pytest.approx(_mean([tree["pair"][0] for tree in everyone]))
        np.testing.assert_allclose(average["pair"][1], np.mean([tree["pair"][1] for tree in everyone], axis=0))


def what_is_given_is_not_changed(comm: MPI.Intracomm) -> None:
    given = tree_of(comm.rank)
    GradientManager(comm).average_gradients(given)
    assert same(given, tree_of(comm.rank))


def sixteen_bits_are_summed_in_fp32(comm: MPI.Intracomm) -> None:
    """1 + 2^-11 is lost in fp16, and 60000 times the ranks overflows; the mean has neither fault."""
    gradients = {
        "small": np.full(3, 1 if comm.rank == 0 else 2.0**-11, np.float16),
        "large": np.full(3, 6e4, np.float16),
    }
    manager = GradientManager(comm)
    average = manager.average_gradients(gradients)
    assert (average["small"] == np.float16((1 + (comm.size - 1) * 2.0**-11) / comm.size)).all()
    assert (average["large"] == np.float16(6e4)).all()
    assert np.isinf(manager.sum_gradients(gradients)["large"]).all()


def sum_is_numpys(comm: MPI.Intracomm) -> None:
    total = GradientManager(comm).sum_gradients({"w": np.arange(7.0) * comm.rank})
    np.testing.assert_array_equal(total["w"], np.arange(7.0) * sum(range(comm.size)))


def weights_are_numbers_of_samples(comm: MPI.Intracomm) -> None:
    samples = [3 * rank for rank in range(comm.size)]
    average = GradientManager(comm).average_gradients({"w": np.full(5, comm.rank + 1.0)}, weight=samples[comm.rank])
    np.testing.assert_allclose(average["w"], np.average([rank + 1.0 for rank in range(comm.size)], weights=samples))


def no_weight_at_all_is_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(DsplanError, match="weight is 0 on every rank"):
        GradientManager(comm).average_gradients({"w": np.ones(2)}, weight=0)
    with pytest.raises(DsplanError, match="weight is -1"):
        GradientManager(comm).average_gradients({"w": np.ones(2)}, weight=-1.0 if comm.rank == 1 else 1.0)


def a_weight_that_is_no_number_ends_every_rank(comm: MPI.Intracomm) -> None:
    weight: Any = "many" if comm.rank == 1 else 1.0
    with pytest.raises(DsplanError, match="weight is many"):
        GradientManager(comm).average_gradients({"w": np.ones(2)}, weight=weight)


def a_gradient_that_a_rank_has_not_counts_as_zero(comm: MPI.Intracomm) -> None:
    gradients = {"mine": np.full(4, 6.0, np.float32) if comm.rank == 0 else None, "nobodys": None}
    average = GradientManager(comm).average_gradients(gradients)
    np.testing.assert_allclose(average["mine"], 6.0 / comm.size)
    assert average["mine"].dtype == np.float32
    assert average["nobodys"] is None


def collection_has_every_ranks_tree(comm: MPI.Intracomm) -> None:
    manager = GradientManager(comm, bucket_bytes=1 << 10)
    last = comm.size - 1
    for root in (0, last, None):
        trees = manager.collect_gradients(tree_of(comm.rank), root=root)
        if root is None or comm.rank == root:
            assert trees is not None
            assert len(trees) == comm.size
            assert all(same(tree, tree_of(rank)) for rank, tree in enumerate(trees))
        else:
            assert trees is None


def collection_keeps_what_is_absent(comm: MPI.Intracomm) -> None:
    trees = GradientManager(comm).collect_gradients({"w": np.arange(3) if comm.rank else None}, root=None)
    assert trees is not None
    assert trees[0] == {"w": None}
    np.testing.assert_array_equal(trees[1]["w"], np.arange(3))


def broadcast_gives_the_roots_values(comm: MPI.Intracomm) -> None:
    root = comm.size - 1
    assert same(GradientManager(comm).broadcast(tree_of(comm.rank), root=root), tree_of(root))


def ranks_that_differ_are_told_so(comm: MPI.Intracomm) -> None:
    manager = GradientManager(comm)
    with pytest.raises(DsplanError, match=r"rank 0 has w float64 \[3\], rank 1 has w float64 \[4\]"):
        manager.average_gradients({"w": np.ones(4 if comm.rank == 1 else 3)})
    with pytest.raises(DsplanError, match="rank 0 has nothing more, rank 1 has x float64"):
        manager.average_gradients({"w": np.ones(3)} | ({"x": np.ones(1)} if comm.rank == 1 else {}))
    with pytest.raises(DsplanError, match=r"'w' is of type set"):
        manager.average_gradients({"w": {1} if comm.rank == 1 else np.ones(3)})  # type: ignore[dict-item]
    with pytest.raises(DsplanError, match="'w' is of int64; gradients are floating-point"):
        manager.average_gradients({"w": np.arange(3)})
    with pytest.raises(DsplanError, match="root is 9; ranks are 0 to"):
        manager.collect_gradients({"w": np.arange(3)}, root=9)
    # After a refusal the ranks are still in step.
    np.testing.assert_allclose(manager.average_gradients({"w": np.ones(3)})["w"], 1.0)


class _Broken(dict[str, Any]):
    def __iter__(self) -> Any:
        raise ZeroDivisionError("a bug")


def a_bug_on_one_rank_ends_the_call_on_all(comm: MPI.Intracomm) -> None:
    tree = _Broken(w=np.ones(3)) if comm.rank == 1 else {"w": np.ones(3)}
    expected, words = (
        (ZeroDivisionError, "a bug") if comm.rank == 1 else (DsplanError, "rank 1: ZeroDivisionError: a bug")
    )
    with pytest.raises(expected, match=words):
        GradientManager(comm).average_gradients(tree)


def keys_may_come_in_any_order(comm: MPI.Intracomm) -> None:
    keys = ["a", "b", "c"][:: 1 if comm.rank else -1]
    average = GradientManager(comm).average_gradients({key: np.full(2, float(ord(key))) for key in keys})
    assert list(average) == keys
    assert all((average[key] == ord(key)).all() for key in keys)


def parallel_sizes_make_groups(comm: MPI.Intracomm) -> None:
    size = comm.size
    for sizes in {
        (size, 1, 1),
        (1, size, 1),
        (1, 1, size),
        *({(2, size // 2, 1), (2, 1, size // 2)} if size % 2 == 0 else ()),
    }:
        config = ModelParallelConfig(*sizes)
        grid = np.arange(size).reshape(sizes[2], sizes[1], sizes[0])  # pipeline, data, model
        with config.split(comm) as groups:
            here = groups.coordinates
            assert grid[here.pipeline, here.data, here.model] == comm.rank
            assert groups.model.allgather(comm.rank) == grid[here.pipeline, here.data, :].tolist()
            assert groups.data.allgather(comm.rank) == grid[here.pipeline, :, here.model].tolist()
            assert groups.pipeline.allgather(comm.rank) == grid[:, here.data, here.model].tolist()


def sizes_that_do_not_fit_are_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(DsplanError, match=rf"= {5 * comm.size} ranks, and there are {comm.size}; start"):
        ModelParallelConfig(model_parallel_size=5, data_parallel_size=comm.size).split(comm)
    with pytest.raises(DsplanError, match=rf"set data_parallel_size to {comm.size}, or start"):
        ModelParallelConfig(data_parallel_size=comm.size + 1).split(comm)


def averages_stay_within_a_group(comm: MPI.Intracomm) -> None:
    groups = ModelParallelConfig(model_parallel_size=comm.size).split(comm)
    average = GradientManager(groups.data).average_gradients({"w": np.full(2, float(comm.rank))})
    assert (average["w"] == comm.rank).all()
    groups.free()


def timers_are_compared_over_ranks(comm: MPI.Intracomm) -> None:
    now = [0.0]
    monitor = PerformanceMonitor(comm, clock=lambda: now[0])
    with monitor.timer("forward_pass"):
        now[0] += 1 + comm.rank
        with monitor.timer("exchange weights", "communication"):
            now[0] += 2
    now[0] += 4
    if comm.rank == 1:
        monitor.start_timer("only here")
        now[0] += 8
    report = monitor.report()
    rows = {row.name: row for row in report.timers}
    assert rows["forward_pass"].seconds == tuple(3.0 + rank for rank in range(comm.size))
    assert rows["forward_pass"].slowest_rank == comm.size - 1
    assert rows["only here"].seconds == tuple(8.0 if rank == 1 else 0.0 for rank in range(comm.size))
    assert report.communication == (2.0,) * comm.size
    assert report.compute == tuple(1.0 + rank + (8.0 if rank == 1 else 0) for rank in range(comm.size))
    assert report.elapsed == tuple(7.0 + rank + (8.0 if rank == 1 else 0) for rank in range(comm.size))
    metrics = monitor.get_performance_metrics()
    assert metrics["forward_pass"] == pytest.approx(3 + (comm.size - 1) / 2)
    assert metrics["communication_fraction"] == pytest.approx(2 / np.mean(report.elapsed))
    assert f"rank {comm.size - 1}: {report.elapsed[-1]:.4f} s" in str(report)


def collectives_are_timed(comm: MPI.Intracomm) -> None:
    monitor = PerformanceMonitor(comm)
    with monitor.timer("step"):
        GradientManager(comm, bucket_bytes=1 << 10, monitor=monitor).average_gradients({"w": np.ones(1024)})
    rows = {row.name: row for row in monitor.report().timers}
    assert rows["all-reduce"].calls == (8,) * comm.size
    assert rows["all-reduce"].kind == "communication"
    assert all(
        0 < inner <= whole for inner, whole in zip(rows["all-reduce"].seconds, rows["step"].seconds, strict=True)
    )


def ranks_are_those_of_the_environment(comm: MPI.Intracomm) -> None:
    variables = read_own_variables()
    assert (variables.rank, variables.world_size) == (comm.rank, comm.size)
