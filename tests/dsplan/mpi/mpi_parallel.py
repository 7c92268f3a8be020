"""Bodies for every rank, under mpirun or on threads: divided layers, recomputing, the trainer, the documented calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsplan import DsplanError
from dsplan.mpi import (
    SGD,
    ActivationCheckpoint,
    CheckpointManager,
    GradientManager,
    ModelParallelConfig,
    ParallelTrainer,
    PerformanceMonitor,
    TensorParallelism,
    ZeROOptimizer,
    ZeROStage,
)


def _layer(inputs: int, outputs: int, seed: int) -> tuple[Any, Any, Any, Any]:
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(inputs, outputs)),
        random.normal(size=outputs),
        random.normal(size=(2, 3, inputs)),
        random.normal(size=(2, 3, outputs)),
    )


def a_layer_divided_either_way_is_the_whole_layer(comm: Any) -> None:
    tp = TensorParallelism(comm)
    weights, biases, inputs, gradients = _layer(5, 7, 1)
    flat = inputs.reshape(-1, 5), gradients.reshape(-1, 7)
    for split_type, axis in (("column", 1), ("row", 0)):
        own_weights, own_biases = tp.split_linear_layer(weights, biases, split_type=split_type)  # type: ignore[arg-type]
        outputs = tp.parallel_linear_forward(inputs, own_weights, own_biases, split_type=split_type)  # type: ignore[arg-type]
        assert np.allclose(outputs, inputs @ weights + biases)
        grad_inputs, grad_weights, grad_biases = tp.parallel_linear_backward(
            inputs,
            gradients,
            own_weights,
            split_type=split_type,  # type: ignore[arg-type]
        )
        assert np.allclose(grad_inputs, gradients @ weights.T)
        parts = comm.allgather(grad_weights)
        assert np.allclose(np.concatenate(parts, axis=axis), flat[0].T @ flat[1])
        whole = np.concatenate(comm.allgather(grad_biases)) if split_type == "column" else grad_biases
        assert np.allclose(whole, flat[1].sum(axis=0))


def columns_then_rows_send_once_each_way(comm: Any) -> None:
    monitor = PerformanceMonitor(comm)
    tp = TensorParallelism(comm, monitor=monitor)
    up, _, inputs, _ = _layer(4, 8, 2)
    down, _, _, gradients = _layer(8, 4, 3)
    own_up, _ = tp.split_linear_layer(up, split_type="column")
    own_down, _ = tp.split_linear_layer(down, split_type="row")
    between = tp.parallel_linear_forward(inputs, own_up, gather_output=False)
    assert between.shape[-1] == own_up.shape[1]
    outputs = tp.parallel_linear_forward(between, own_down, split_type="row")
    assert np.allclose(outputs, inputs @ up @ down)
    grad_between, _, _ = tp.parallel_linear_backward(between, gradients, own_down, split_type="row")
    grad_inputs, grad_up, _ = tp.parallel_linear_backward(inputs, grad_between, own_up)
    assert np.allclose(grad_inputs, gradients @ down.T @ up.T)
    assert grad_up.shape == own_up.shape
    calls = {row.name: max(row.calls) for row in monitor.report().timers}
    assert calls["all-reduce"] == 2
    assert "all-gather" not in calls


def layers_that_do_not_fit_are_named_on_every_rank(comm: Any) -> None:
    tp = TensorParallelism(comm)
    with pytest.raises(DsplanError, match="split_type is 'rows'; it is 'column' or 'row'"):
        tp.split_linear_layer(np.ones((4, 4)), split_type="rows")  # type: ignore[arg-type]
    with pytest.raises(DsplanError, match="1 columns do not divide over" if comm.size > 1 else "biases are"):
        tp.split_linear_layer(np.ones((4, 1)), np.ones(1 if comm.size > 1 else 2))
    with pytest.raises(DsplanError, match="the last dimension of the one is the first of the other"):
        tp.parallel_linear_forward(np.ones((2, 3)), np.ones((4, 4)))
    if comm.size > 1:
        with pytest.raises(DsplanError, match="parallel_linear_forward: ranks differ"):
            tp.parallel_linear_forward(np.ones((2 + comm.rank, 4)), np.ones((4, 4)))


def _forward(x: Any, weights: Any, biases: Any) -> Any:
    return np.tanh(x @ weights + biases)


def _backward(gradient: Any, x: Any, weights: Any, biases: Any) -> tuple[Any, Any, Any]:
    inner = gradient * (1 - np.tanh(x @ weights + biases) ** 2)
    return inner @ weights.T, x.T @ inner, inner.sum(axis=0)


def recomputed_layers_have_the_gradients_of_kept_ones(comm: Any) -> None:
    random = np.random.default_rng(4)
    layers = [(random.normal(size=(6, 6)) / 2, random.normal(size=6)) for _ in range(6)]
    x, gradient = random.normal(size=(5, 6)), random.normal(size=(5, 6))
    runs = []

    def counted(*inputs: Any) -> Any:
        runs.append(1)
        return _forward(*inputs)

    gradients_of, kept = {}, {}
    for segments in (2, 6):
        checkpoint = ActivationCheckpoint(checkpoint_segments=segments)
        checkpoint.register_function("layer", counted, _backward)
        runs.clear()
        value = x
        for index, layer in enumerate(layers):
            value = checkpoint.checkpoint_activations("layer", index, len(layers), [value, *layer])
        kept[segments] = checkpoint.kept_bytes
        above, of_weights = gradient, []
        for index in reversed(range(len(layers))):
            above, *rest = checkpoint.backward_pass("layer", index, len(layers), above)
            of_weights.append(rest)
        gradients_of[segments] = (above, of_weights)
        assert checkpoint.kept_bytes == 0
        assert len(runs) == {2: 6 + 4, 6: 6}[segments], "a layer runs again once at most"
    assert kept == {2: 2 * x.nbytes, 6: 6 * x.nbytes}
    assert np.array_equal(gradients_of[2][0], gradients_of[6][0])
    assert all(
        np.array_equal(a, b)
        for pair in zip(gradients_of[2][1], gradients_of[6][1], strict=True)
        for a, b in zip(*pair, strict=True)
    )
    with pytest.raises(DsplanError, match=r"'layer_0' is not registered \(registered: layer\)"):
        checkpoint.checkpoint_activations("layer_0", 0, 2, [x])
    with pytest.raises(DsplanError, match="layer 3 runs after 0 layers; run them in order"):
        checkpoint.checkpoint_activations("layer", 3, 6, [x, *layers[0]])


class _Line:
    """y = x . w, with the gradients written out."""

    def __init__(self) -> None:
        self.parameters = {"w": np.zeros((3, 1))}

    def gradients(self, batch: Any) -> tuple[float, Any]:
        x, y = batch
        error = x @ self.parameters["w"] - y
        return float(np.square(error).mean()), {"w": 2 * x.T @ error / len(x)}


class _Divided(_Line):
    """The same, whose rows are divided over the ranks that share a model."""

    def split(self, groups: Any) -> None:
        self.tp = TensorParallelism(groups.model)
        own, _ = self.tp.split_linear_layer(self.parameters["w"], split_type="row")
        self.parameters = {"w": own}

    def gradients(self, batch: Any) -> tuple[float, Any]:
        x, y = batch
        error = self.tp.parallel_linear_forward(x, self.parameters["w"], split_type="row") - y
        gradient = 2 * error / len(x)
        _, of_weights, _ = self.tp.parallel_linear_backward(x, gradient, self.parameters["w"], "row")
        return float(np.square(error).mean()), {"w": of_weights}


def _batches(count: int) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(5)
    inputs = [random.normal(size=(4, 3)) for _ in range(count)]
    return [(x, x @ np.array([[1.0], [2.0], [3.0]])) for x in inputs]


def a_trainer_learns_what_one_rank_learns_of_all_batches(comm: Any) -> None:
    batches = _batches(4 * comm.size)
    model = _Line()
    with ParallelTrainer(comm=comm, learning_rate=0.1, rule=SGD(), seed=3) as trainer:
        losses = trainer.train(model, batches, epochs=2)
        assert losses[1] < losses[0]
        alone, step = _Line(), 0
        for epoch in range(2):
            order = np.random.default_rng(3 + epoch).permutation(len(batches))
            for first in range(0, len(order), comm.size):
                each = [alone.gradients(batches[number])[1]["w"] for number in order[first : first + comm.size]]
                alone.parameters["w"] -= 0.1 * np.mean(each, axis=0)
                step += 1
        assert step == 8
        assert np.allclose(model.parameters["w"], alone.parameters["w"])
        with pytest.raises(DsplanError, match=r"object has no parameters and gradients\(batch\); write them"):
            trainer.train(object(), batches)
        if comm.size > 1:
            with pytest.raises(DsplanError, match="1 batches do not go round"):
                trainer.train(model, batches[:1])


def a_model_that_divides_itself_learns_the_same(comm: Any) -> None:
    if comm.size % 2:
        return
    config = ModelParallelConfig(model_parallel_size=2, data_parallel_size=comm.size // 2)
    results = []
    for kind, sizes in ((_Divided, config), (_Line, ModelParallelConfig(data_parallel_size=comm.size))):
        model = kind()
        with ParallelTrainer(sizes, comm, learning_rate=0.05, rule=SGD(), stage=ZeROStage.STAGE_2) as trainer:
            # As many steps each: with fewer ranks to share them, fewer batches.
            losses = trainer.train(model, _batches(2 * trainer.groups.data.Get_size()), epochs=20)
        assert losses[-1] < losses[0] / 10
        results.append(model.parameters["w"])
    assert results[0].shape[0] < 3
    with ParallelTrainer(config, comm) as trainer, pytest.raises(DsplanError, match=r"_Line has no split\(groups\)"):
        trainer.train(_Line(), _batches(4))


def the_calls_of_other_libraries(comm: Any, directory: Path) -> None:
    monitor = PerformanceMonitor(comm)
    monitor.start_timer("forward_pass")
    monitor.stop_timer("forward_pass")
    assert monitor.get_performance_metrics()["forward_pass"] >= 0
    manager = GradientManager(comm)
    averaged = manager.average_gradients({"w": np.full(3, float(comm.rank))})
    assert np.allclose(averaged["w"], (comm.size - 1) / 2)
    parameters = {"w": np.ones(5)}
    optimizer = ZeROOptimizer(dp_comm=comm, stage=ZeROStage.STAGE_2, learning_rate=0.001)
    optimizer.register_parameters(parameters)
    reduced = optimizer.reduce_gradients({"w": np.ones(5)})
    updated = optimizer.step(parameters, reduced)
    assert np.allclose(updated["w"], 1 - 0.001)
    checkpoints = CheckpointManager(comm, directory / "calls")
    checkpoints.save_checkpoint(updated, step=1000)
    assert np.array_equal(checkpoints.load_checkpoint(step=1000)["w"], updated["w"])
