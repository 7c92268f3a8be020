"""Linear layers divided over the ranks of a communicator, forward and backward, on numpy arrays.

Megatron-LM's two ways (Shoeybi et al. 2019, arXiv:1909.08053, section 3): by columns every rank makes some of the
outputs, by rows some of the terms of all of them. A column layer whose output stays divided, followed by a row layer,
takes one all-reduce in forward and one in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from dsplan.mpi.arrays import Array
from dsplan.mpi.buckets import bounds
from dsplan.mpi.communicator import Communicator
from strategies.errors import CannotRun

if TYPE_CHECKING:
    from mpi4py import MPI

    from dsplan.mpi.communicator import PerformanceMonitor

Split = Literal["column", "row"]
Value = TypeVar("Value")


class TensorParallelism:
    """Divides linear layers, `inputs @ weights + biases` with weights [inputs, outputs], over ranks.

        tp = TensorParallelism(MPI.COMM_WORLD)
        weights, biases = tp.split_linear_layer(whole_weights, whole_biases, split_type="column")
        outputs = tp.parallel_linear_forward(inputs, weights, biases, split_type="column")
        grad_inputs, grad_weights, grad_biases = tp.parallel_linear_backward(inputs, grad_outputs, weights, "column")

    All ranks call each method together. Arrays have any number of leading dimensions. Sums over ranks of 16-bit arrays
    are made in fp32.

    Args:
        comm: the ranks that hold the parts of a layer; None: all.
        monitor: gets the time of every collective.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: shapes do not fit together, here or between ranks; all ranks raise.
    """

    def __init__(self, comm: MPI.Comm | None = None, *, monitor: PerformanceMonitor | None = None) -> None:
        self._communicator = Communicator(comm, monitor)

    def split_linear_layer(
        self, weights: Array, biases: Array | None = None, split_type: Split = "column"
    ) -> tuple[Array, Array | None]:
        """Return this rank's part of a layer that every rank has whole.

        Columns and their biases, or rows and all biases.
        """

        def parts() -> tuple[Array, Array | None]:
            _require_matrix(weights, split_type)
            if biases is not None and np.shape(biases) != (weights.shape[1],):
                raise CannotRun(f"split_linear_layer: biases are {list(np.shape(biases))}, outputs {weights.shape[1]}")
            axis = 1 if split_type == "column" else 0
            if weights.shape[axis] < self._communicator.size:
                raise CannotRun(
                    f"split_linear_layer: {weights.shape[axis]} {split_type}s do not divide over"
                    f" {self._communicator.size} ranks; use fewer ranks"
                )
            own = self._own(weights.shape[axis])
            if axis == 0:
                return weights[own].copy(), None if biases is None else biases.copy()
            return weights[:, own].copy(), None if biases is None else biases[own].copy()

        return self._together(
            "split_linear_layer", parts, lambda _: [f"{split_type} of weights {list(weights.shape)} {weights.dtype}"]
        )

    def parallel_linear_forward(
        self,
        inputs: Array,
        weights: Array,
        biases: Array | None = None,
        split_type: Split = "column",
        *,
        gather_output: bool = True,
    ) -> Array:
        """Return what the whole layer gives, from this rank's part of it.

        Args:
            weights: this rank's columns or rows, [in, out].
            biases: this rank's of columns, all of rows.
            split_type: `column` or `row`.
            inputs: whole on every rank; for rows also this rank's part, as a column layer leaves it.
            gather_output: False leaves the outputs of a column layer divided: this rank's alone.
        """
        action = "parallel_linear_forward"

        def own_inputs() -> Array:
            _require_split(split_type)
            here = self._own_part(inputs, weights.shape[0]) if split_type == "row" else inputs
            if here.shape[-1] != weights.shape[0]:
                raise CannotRun(
                    f"{action}: inputs are {list(inputs.shape)}, weights {list(weights.shape)}; the last dimension of"
                    " the one is the first of the other"
                )
            return here

        here = self._together(action, own_inputs, lambda own: [f"{split_type}, {list(own.shape[:-1])} {own.dtype}"])
        outputs: Array = here @ weights
        if split_type == "row":
            outputs = self._summed(outputs)
        if biases is not None:
            outputs = outputs + biases
        return self._gathered(outputs) if split_type == "column" and gather_output else outputs

    def parallel_linear_backward(
        self, inputs: Array, grad_outputs: Array, weights: Array, split_type: Split = "column"
    ) -> tuple[Array, Array, Array]:
        """Gradients of the inputs, and of this rank's weights and biases.

        Args:
            weights: as forward had them.
            split_type: `column` or `row`.
            inputs: as forward had them; their gradient is whole where they were, else this rank's part.
            grad_outputs: whole, or this rank's part where a column layer left its outputs divided.
        """
        action = "parallel_linear_backward"

        def own_parts() -> tuple[Array, Array]:
            _require_split(split_type)
            is_row = split_type == "row"
            here = inputs if not is_row else self._own_part(inputs, weights.shape[0])
            gradients = grad_outputs if is_row else self._own_part(grad_outputs, weights.shape[1])
            if here.shape[:-1] != gradients.shape[:-1] or weights.shape != (here.shape[-1], gradients.shape[-1]):
                raise CannotRun(
                    f"{action}: inputs {list(inputs.shape)}, weights {list(weights.shape)} and gradients"
                    f" {list(grad_outputs.shape)} are not of one layer and the same samples"
                )
            return here, gradients

        here, gradients = self._together(
            action, own_parts, lambda own: [f"{split_type}, {list(own[0].shape[:-1])} {own[1].dtype}"]
        )
        grad_inputs: Array = gradients @ weights.T
        if split_type == "column":
            grad_inputs = self._summed(grad_inputs)
        elif inputs.shape[-1] != weights.shape[0]:
            grad_inputs = self._gathered(grad_inputs)
        rows, columns = _rows(here), _rows(gradients)
        return grad_inputs, rows.T @ columns, columns.sum(axis=0)

    def _together(self, action: str, describe: Callable[[], Value], words: Callable[[Value], Sequence[str]]) -> Value:
        return self._communicator.require_same(action, describe, words)

    def _own(self, count: int) -> slice:
        """Return the part of `count` columns or rows that this rank has."""
        return slice(*bounds(count, self._communicator.size, self._communicator.rank))

    def _own_part(self, values: Array, width: int) -> Array:
        """`values` if they are this rank's part already, else its part of the last dimension."""
        if values.shape[-1] == width:
            return values
        own = self._own(values.shape[-1])
        if own.stop - own.start != width:
            raise CannotRun(
                f"the last dimension is {values.shape[-1]} and this rank's part of the layer has {width} of it; give"
                " all of it or this rank's part"
            )
        return values[..., own]

    def _summed(self, values: Array) -> Array:
        total = np.ascontiguousarray(values, dtype=np.promote_types(values.dtype, np.float32))
        if total is values:
            total = values.copy()
        self._communicator.all_reduce(total)
        return total.astype(values.dtype, copy=False)

    def _gathered(self, values: Array) -> Array:
        """Every rank's part of the last dimension, side by side."""
        widths = self._communicator.all_gather_objects(values.shape[-1])
        rows = values.size // values.shape[-1] if values.shape[-1] else 0
        flat = self._communicator.all_gather(
            np.ascontiguousarray(values).reshape(-1), [rows * width for width in widths]
        )
        ends = np.cumsum([rows * width for width in widths])[:-1]
        parts = [
            part.reshape(*values.shape[:-1], width) for part, width in zip(np.split(flat, ends), widths, strict=True)
        ]
        return np.concatenate(parts, axis=-1)


def _rows(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1])


def _require_split(split_type: str) -> None:
    if split_type not in ("column", "row"):
        raise CannotRun(f"split_type is {split_type!r}; it is 'column' or 'row'")


def _require_matrix(weights: Array, split_type: str) -> None:
    _require_split(split_type)
    if np.ndim(weights) != 2:
        raise CannotRun(f"split_linear_layer: weights are {list(np.shape(weights))}; give a matrix [inputs, outputs]")
