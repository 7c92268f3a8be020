"""Bodies: ZeROOptimizer against torch's optimizers on whole parameters, and the bytes that it really keeps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from dsplan import DsplanError
from dsplan.mpi import SGD, AdamW, PerformanceMonitor, ReducedGradients, ZeROOptimizer, ZeROStage
from dsplan.mpi.arrays import leaves

STEPS, RATE = 6, 1e-2
HALF = ("half",)
Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
RULES: list[tuple[Any, Optimizer]] = [
    (None, lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)),
    (
        AdamW(betas=(0.8, 0.9), weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=RATE, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    (SGD(), lambda parameters: torch.optim.SGD(parameters, lr=RATE)),
    (SGD(momentum=0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=0.1)),
]


def _parameters(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    block = [{"w": random.normal(size=(13, 7)).astype(np.float32), "b": random.normal(size=7)} for _ in range(2)]
    return {
        "blocks": block,
        "one": random.normal(size=1).astype(np.float32),
        "half": random.normal(size=9).astype(np.float16),
    }


def _gradients(step: int, rank: int) -> dict[str, Any]:
    return _parameters(1000 + 100 * step + rank)


def _reference(ranks: int, make: Optimizer, clip: float | None = None) -> dict[Any, np.ndarray[Any, Any]]:
    """Return what one process with all gradients gets; fp16 parameters as the fp32 masters that stand behind them."""
    wide = {path: torch.tensor(_wide(value), requires_grad=True) for path, value in leaves(_parameters()).items()}
    optimizer = make(list(wide.values()))
    for step in range(STEPS):
        everyone = [leaves(_gradients(step, rank)) for rank in range(ranks)]
        for path, tensor in wide.items():
            tensor.grad = torch.tensor(
                np.mean([_wide(tree[path]) for tree in everyone], axis=0, dtype=_wide(everyone[0][path]).dtype)
            )
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(wide.values()), clip)
        optimizer.step()
    return {path: tensor.detach().numpy() for path, tensor in wide.items()}


def _wide(value: Any) -> np.ndarray[Any, Any]:
    return value.astype(np.float32) if value.dtype == np.float16 else value


def _trained(comm: MPI.Intracomm, stage: ZeROStage, rule: Any, **step_options: Any) -> tuple[ZeROOptimizer, Any]:
    optimizer = ZeROOptimizer(comm, stage, RATE, rule=rule, bucket_bytes=1 << 10)
    parameters = _parameters()
    optimizer.register_parameters(parameters)
    for step in range(STEPS):
        reduced = optimizer.reduce_gradients(_gradients(step, comm.rank))
        parameters = optimizer.step(parameters, reduced, **step_options)
    return optimizer, parameters


def _require_close(tree: Any, expected: dict[Any, np.ndarray[Any, Any]]) -> None:
    for path, value in leaves(tree).items():
        tolerance = 2e-3 if path == HALF else 2e-6
        np.testing.assert_allclose(_wide(value), expected[path], rtol=tolerance, atol=tolerance, err_msg=str(path))
        assert value.dtype == leaves(_parameters())[path].dtype


def every_stage_steps_as_torch_does(comm: MPI.Intracomm) -> None:
    for rule, make in RULES:
        expected = _reference(comm.size, make)
        for stage in ZeROStage:
            _require_close(_trained(comm, stage, rule)[1], expected)


def clipping_is_torchs(comm: MPI.Intracomm) -> None:
    expected = _reference(comm.size, RULES[1][1], clip=0.5)
    for stage in ZeROStage:
        _require_close(_trained(comm, stage, RULES[1][0], clip_norm=0.5)[1], expected)


def steps_in_place_write_into_the_arrays(comm: MPI.Intracomm) -> None:
    given = _parameters()
    kept = given["blocks"][0]["w"]
    for stage in ZeROStage:
        other = _trained(comm, stage, None)[1]
        mine = ZeROOptimizer(comm, stage, RATE)
        given.update(_parameters() | {"blocks": given["blocks"]})
        kept[...] = _parameters()["blocks"][0]["w"]
        given["blocks"][0]["b"][...] = _parameters()["blocks"][0]["b"]
        given["blocks"][1] = _parameters()["blocks"][1]
        mine.register_parameters(given)
        for step in range(STEPS):
            assert mine.step(given, mine.reduce_gradients(_gradients(step, comm.rank)), in_place=True) is given
        assert given["blocks"][0]["w"] is kept
        for path, value in leaves(other).items():
            np.testing.assert_array_equal(leaves(given)[path], value)


def parameters_stay_partitioned_until_they_are_gathered(comm: MPI.Intracomm) -> None:
    whole = _trained(comm, ZeROStage.STAGE_3, None)[1]
    optimizer = ZeROOptimizer(comm, 3, RATE)
    optimizer.register_parameters(_parameters())
    for step in range(STEPS):
        assert optimizer.step(None, optimizer.reduce_gradients(_gradients(step, comm.rank))) is None
    np.testing.assert_array_equal(optimizer.gather_parameters("blocks", 1, "w"), whole["blocks"][1]["w"])
    assert list(optimizer.gather_parameters("blocks", 0)) == ["w", "b"]
    for path, value in leaves(optimizer.gather_parameters()).items():
        np.testing.assert_array_equal(value, leaves(whole)[path])


def layers_and_micro_batches_add_up(comm: MPI.Intracomm) -> None:
    """Two micro-batches, given layer by layer: the mean of their gradients."""
    for stage in ZeROStage:
        optimizer = ZeROOptimizer(comm, stage, RATE)
        optimizer.register_parameters(_parameters())
        reduced = ReducedGradients({}, divided=stage > 1)
        for micro_batch in range(2):
            gradients = _gradients(micro_batch, comm.rank)
            for name in ("one", "half"):
                reduced = reduced + optimizer.reduce_gradients({name: gradients[name]})
            reduced = reduced + optimizer.reduce_gradients({"blocks": gradients["blocks"]})
        mean = reduced.scaled(0.5)
        everyone = [leaves(_gradients(step, rank)) for step in range(2) for rank in range(comm.size)]
        square = sum(
            float(np.square(np.mean([_wide(tree[path]) for tree in everyone], axis=0)).sum()) for path in everyone[0]
        )
        assert optimizer.norm(mean) == pytest.approx(square**0.5, rel=1e-6)


def what_gets_no_gradient_stays(comm: MPI.Intracomm) -> None:
    optimizer = ZeROOptimizer(comm, 2, RATE, rule=AdamW(weight_decay=0.5))
    optimizer.register_parameters(_parameters())
    gradients = {"one": np.ones(1, np.float32) if comm.rank == 0 else None, "half": None}
    stepped = optimizer.step(_parameters(), optimizer.reduce_gradients(gradients))
    np.testing.assert_array_equal(stepped["half"], _parameters()["half"])
    assert stepped["one"] != _parameters()["one"]


def what_the_script_changes_between_steps_counts(comm: MPI.Intracomm) -> None:
    """In fp16 too, where the masters are the optimizer's own."""
    for stage in ZeROStage:
        optimizer = ZeROOptimizer(comm, stage, 0.5, rule=SGD())
        parameters = {"w": np.full(7, 1.0, np.float16), "v": np.full(7, 1.0, np.float32)}
        optimizer.register_parameters(parameters)
        nothing = {"w": np.zeros(7, np.float16), "v": np.zeros(7, np.float32)}
        parameters = optimizer.step(parameters, optimizer.reduce_gradients(nothing))
        parameters["w"][:] = 3.0
        parameters["v"][:] = 4.0
        parameters = optimizer.step(parameters, optimizer.reduce_gradients(nothing))
        assert (parameters["w"] == 3.0).all()
        assert (parameters["v"] == 4.0).all()


def masters_keep_what_fp16_cannot(comm: MPI.Intracomm) -> None:
    """Ten steps of 1e-4 at 1.0, where fp16 has steps of 1e-3: alone each is lost, together they are not."""
    optimizer = ZeROOptimizer(comm, 2, 1.0, rule=SGD())
    parameters = {"w": np.full(5, 1.0, np.float16)}
    optimizer.register_parameters(parameters)
    for _ in range(10):
        parameters = optimizer.step(parameters, optimizer.reduce_gradients({"w": np.full(5, -1e-4, np.float16)}))
    assert (parameters["w"] == np.float16(1.001)).all()


def memory_is_a_part_of_the_whole(comm: MPI.Intracomm) -> None:
    """Live and peak bytes of a million fp32 parameters, as numpy allocates them."""
    count, ranks = 1_000_000, comm.size
    whole = 4 * count
    for stage, gradients_bytes, parameters_bytes in (
        (1, whole, 0),
        (2, whole / ranks, 0),
        (3, whole / ranks, whole / ranks),
    ):
        optimizer = ZeROOptimizer(comm, stage, RATE, bucket_bytes=1 << 18)
        parameters = {"w": np.zeros((1000, count // 1000), np.float32)}
        gradients = {"w": np.ones((1000, count // 1000), np.float32)}
        tracemalloc.start()
        optimizer.register_parameters(parameters)
        assert tracemalloc.get_traced_memory()[0] == pytest.approx(2 * whole / ranks + parameters_bytes, rel=0.02)
        reduced = optimizer.reduce_gradients(gradients)
        assert reduced.bytes == pytest.approx(gradients_bytes, rel=0.02)
        kept = 2 * whole / ranks + parameters_bytes + gradients_bytes
        assert tracemalloc.get_traced_memory()[0] == pytest.approx(kept, rel=0.02)
        tracemalloc.reset_peak()
        optimizer.step(None if stage == 3 else parameters, reduced, in_place=stage < 3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The rule's temporaries and the run that is being updated: at most four arrays of this rank's size.
        assert peak < kept + 4 * whole / ranks + (1 << 20)
        memory = optimizer.memory()
        assert memory.optimizer_bytes == pytest.approx(2 * whole / ranks, rel=0.02)
        assert memory.parameters_bytes == pytest.approx(parameters_bytes, rel=0.02)


def learning_rate_may_change(comm: MPI.Intracomm) -> None:
    optimizer = ZeROOptimizer(comm, 1, 1.0, rule=SGD())
    optimizer.register_parameters({"w": np.zeros(3)})
    reduced = optimizer.reduce_gradients({"w": np.ones(3)})
    first = optimizer.step({"w": np.zeros(3)}, reduced)
    optimizer.learning_rate = 0.25
    assert (optimizer.step(first, reduced)["w"] == -1.25).all()


def communication_is_timed(comm: MPI.Intracomm) -> None:
    monitor = PerformanceMonitor(comm)
    optimizer = ZeROOptimizer(comm, 2, RATE, monitor=monitor)
    optimizer.register_parameters({"w": np.zeros(64)})
    optimizer.step({"w": np.zeros(64)}, optimizer.reduce_gradients({"w": np.ones(64)}))
    calls = {row.name: row.calls[0] for row in monitor.report().timers}
    assert (calls["reduce-scatter"], calls["all-gather"]) == (1, 1)


def what_is_wrong_is_told_to_all(comm: MPI.Intracomm) -> None:
    optimizer = ZeROOptimizer(comm, 2, RATE)
    with pytest.raises(DsplanError, match="ranks differ: rank 0 has w with checksum"):
        optimizer.register_parameters({"w": np.full(3, float(comm.rank))})
    with pytest.raises(DsplanError, match="'w' is of int64; only floating-point"):
        optimizer.register_parameters({"w": np.arange(3)})
    with pytest.raises(DsplanError, match="no registered parameter; registered: none"):
        optimizer.reduce_gradients({"w": np.ones(3)})
    optimizer.register_parameters({"w": np.ones(3)})
    with pytest.raises(DsplanError, match=r"gradient of 'w' is float64 \[4\], the parameter float64 \[3\]"):
        optimizer.reduce_gradients({"w": np.ones(4 if comm.rank == 1 else 3)})
    reduced = optimizer.reduce_gradients({"w": np.ones(3)})
    with pytest.raises(DsplanError, match="stage 2 keeps none; give them"):
        optimizer.step(None, reduced)
    with pytest.raises(DsplanError, match="not the parameters that were registered"):
        optimizer.step({"v": np.ones(3)} if comm.rank == 0 else {"w": np.ones(3)}, reduced)
    with pytest.raises(DsplanError, match=r"'w' has shape \[2\]; \[3\] was registered"):
        optimizer.step({"w": np.ones(2)}, reduced)
    with pytest.raises(DsplanError, match="not reduced by this optimizer"):
        optimizer.step({"w": np.ones(3)}, ReducedGradients({}, divided=False))
    with pytest.raises(DsplanError, match="only stage 3 has parts"):
        optimizer.gather_parameters()
    with pytest.raises(DsplanError, match="clip_norm is -1; it must be"):
        optimizer.step({"w": np.ones(3)}, reduced, clip_norm=-1)
    optimizer.learning_rate = float("nan")
    with pytest.raises(DsplanError, match="learning_rate is nan"):
        optimizer.step({"w": np.ones(3)}, reduced)
    with pytest.raises(DsplanError, match="stage is 4; it is"):
        ZeROOptimizer(comm, 4, RATE)


def gathering_names_the_keys_there_are(comm: MPI.Intracomm) -> None:
    optimizer = ZeROOptimizer(comm, 3, RATE)
    optimizer.register_parameters(_parameters())
    with pytest.raises(DsplanError, match=r"there is no 'blocks/5'; blocks has 0, 1"):
        optimizer.gather_parameters("blocks", 5)
