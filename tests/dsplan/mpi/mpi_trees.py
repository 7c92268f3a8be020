"""Trees of arrays that every rank can compute for every rank, their comparison, and a training that never differs."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from dsplan.mpi import ZeROOptimizer
from dsplan.mpi.arrays import leaves

STEP = 1000


def tree_of(rank: int) -> dict[str, Any]:
    """A rank's gradients: several dtypes, layouts and nestings, none, one and many elements."""
    random = np.random.default_rng(rank)
    layer = {
        "w": random.normal(size=(37, 29)).astype(np.float32),
        "half": random.normal(size=11).astype(np.float16),
        "double": random.normal(size=(3, 5)),
        "empty": np.zeros((0, 4), np.float32),
        "transposed": random.normal(size=(6, 7)).astype(np.float32).T,
    }
    return {
        "layers": [layer, {"b": random.normal(size=5).astype(np.float32)}],
        "pair": (float(rank) + 0.25, random.normal(size=4) + 1j * random.normal(size=4)),
        7: np.float32(rank),
    }


def same(one: Any, two: Any) -> bool:
    """Return whether two trees have the same nesting, dtypes and values."""
    first, second = leaves(one), leaves(two)
    return list(first) == list(second) and all(
        np.asarray(first[path]).dtype == np.asarray(second[path]).dtype and np.array_equal(first[path], second[path])
        for path in first
    )


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(5)
    return {"w": random.normal(size=(7, 5)).astype(np.float32), "half": random.normal(size=11).astype(np.float16)}


def gradients(step: int) -> dict[str, Any]:
    """The same on every rank, so that the number of ranks does not change the training."""
    random = np.random.default_rng(step)
    return {"w": random.normal(size=(7, 5)).astype(np.float32), "half": random.normal(size=11).astype(np.float32)}


def trained(comm: MPI.Intracomm, stage: int, steps: int) -> tuple[ZeROOptimizer, Any]:
    """An optimizer and parameters after some steps."""
    optimizer = ZeROOptimizer(comm, stage, 1e-2)
    model: Any = parameters()
    optimizer.register_parameters(model)
    for step in range(steps):
        model = optimizer.step(model, optimizer.reduce_gradients(gradients(step)))
    return optimizer, model


def whole_matrix(ranks: int) -> np.ndarray[Any, Any]:
    """Return what the ranks' columns make together."""
    return np.arange(4.0 * 2 * ranks).reshape(4, 2 * ranks)
