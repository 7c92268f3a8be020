"""GradientManager: sums, averages and collects trees of arrays over the ranks of a communicator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsplan.mpi.arrays import Array, Form, Tree, rebuilt
from dsplan.mpi.buckets import (
    BUCKET_BYTES,
    Bucket,
    Exchange,
    FlatLeaves,
    Leaf,
    checked_bucket_bytes,
    common_leaves,
    require_summable,
    whole_buckets,
)
from dsplan.mpi.communicator import Communicator
from strategies.errors import CannotRun

if TYPE_CHECKING:
    from mpi4py import MPI

    from dsplan.mpi.communicator import PerformanceMonitor


class GradientManager:
    """Gradients over the ranks of a communicator; every rank calls each method together.

        gradient_mgr = GradientManager(MPI.COMM_WORLD)
        averaged = gradient_mgr.average_gradients({"layer1": {"weight": array, "bias": array}})

    A tree is any nesting of dicts, lists and tuples; its leaves are numpy arrays, numpy scalars, floats or torch
    tensors, or None if this rank has no gradient (it then counts as zero). What comes back has the same nesting,
    types, dtypes and devices; what goes in is never changed. fp16 and bfloat16 are summed in fp32.

    Args:
        comm: the ranks; None: all.
        bucket_bytes: the size of a message; small arrays share one, large ones take several.
        monitor: gets the time of every collective.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: an argument is of no use; all methods raise it on all ranks where trees differ between ranks.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        monitor: PerformanceMonitor | None = None,
    ) -> None:
        self._communicator = Communicator(comm, monitor)
        self._bucket_bytes = checked_bucket_bytes(bucket_bytes)

    def average_gradients(self, gradients: Tree, *, weight: float | None = None) -> Tree:
        """Return the mean over ranks.

        `weight` is this rank's part in it, as its number of samples; None: all the same.
        """
        also = "mean" if weight is None else "weighted mean"
        common = common_leaves(
            self._communicator, gradients, Exchange(action="average_gradients", also=also, require=require_summable)
        )
        if weight is None:
            return self._all_reduced(gradients, common, lambda sums, add: _divided(add(sums), self._communicator.size))
        total = self._total(weight)  # the check that ranks make together comes before all that may fail on one
        own = float(weight)
        return self._all_reduced(
            gradients, common, lambda sums, add: _divided(add(np.multiply(sums, own, out=sums)), total)
        )

    def sum_gradients(self, gradients: Tree) -> Tree:
        """Return the sum over ranks, in each leaf's own dtype: fp16 becomes infinite beyond 65504."""
        common = common_leaves(
            self._communicator, gradients, Exchange(action="sum_gradients", also="sum", require=require_summable)
        )
        return self._all_reduced(gradients, common, lambda sums, add: add(sums))

    def collect_gradients(self, gradients: Tree, root: int | None = 0) -> list[Tree] | None:
        """Every rank's tree, in the order of ranks: on `root` (None elsewhere), or on all ranks where root is None."""
        common = self._rooted(gradients, "collect_gradients", root)
        present = [leaf for leaf in common if leaf.form is not None]
        here = root is None or root == self._communicator.rank
        out = [
            [np.empty(form.count, dtype=form.transfer_dtype) for form in _forms(present)]
            for _ in range(self._communicator.size)
        ]
        out = out if here else []
        limit = self._bucket_bytes if root is not None else self._bucket_bytes // self._communicator.size
        for bucket, flats in self._buckets(present, lambda form: form.transfer_dtype, limit):
            rows = self._rows(bucket.filled(flats), root)
            for rank, flat in enumerate(out):
                bucket.spread(rows[rank], flat)
        trees = [_tree(gradients, present, flat, rank) for rank, flat in enumerate(out)]
        return trees if here else None

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """`root`'s values on every rank; any dtype. Gives ranks the same parameters before the first step."""
        common = self._rooted(tree, "broadcast", root)
        present = [leaf for leaf in common if leaf.form is not None and root not in leaf.absent]
        out = [np.empty(form.count, dtype=form.transfer_dtype) for form in _forms(present)]
        for bucket, flats in self._buckets(present, lambda form: form.transfer_dtype, self._bucket_bytes):
            buffer = bucket.filled(flats)
            self._communicator.broadcast(root, buffer)
            bucket.spread(buffer, out)
        return _tree(tree, present, out)

    def _all_reduced(
        self, tree: Tree, common: Sequence[Leaf], reduce: Callable[[Array, Callable[[Array], Array]], Array]
    ) -> Tree:
        present = [leaf for leaf in common if leaf.form is not None]
        out = [np.empty(form.count, dtype=form.transfer_dtype) for form in _forms(present)]
        for bucket, flats in self._buckets(present, lambda form: form.reduce_dtype, self._bucket_bytes):
            sums = reduce(bucket.filled(flats), self._added)
            with np.errstate(over="ignore"):  # a sum that fp16 cannot hold is infinite, as it says
                bucket.spread(sums, out)
        return _tree(tree, present, out)

    def _added(self, buffer: Array) -> Array:
        self._communicator.all_reduce(buffer)
        return buffer

    def _total(self, weight: float) -> float:
        def checked() -> float:
            try:
                number = float(weight)
            except (TypeError, ValueError):
                number = math.nan
            if not (math.isfinite(number) and number >= 0):
                raise CannotRun(f"weight is {weight}; it must be zero or more, as a number of samples is")
            return number

        own, _ = self._communicator.compare(checked, lambda _: ())
        total = np.array([own], dtype=np.float64)
        self._communicator.all_reduce(total)
        if total[0] == 0:
            raise CannotRun("weight is 0 on every rank, so there is no average; give a rank a weight above 0")
        return float(total[0])

    def _rooted(self, tree: Tree, action: str, root: int | None) -> list[Leaf]:
        def within() -> None:
            if root is not None and not 0 <= root < self._communicator.size:
                raise CannotRun(f"{action}: root is {root}; ranks are 0 to {self._communicator.size - 1}")

        return common_leaves(self._communicator, tree, Exchange(action=action, also=f"root {root}", check=within))

    def _buckets(
        self, present: Sequence[Leaf], dtype: Callable[[Form], np.dtype[Any]], limit: int
    ) -> Iterator[tuple[Bucket, dict[int, Array | None]]]:
        forms, flats = _forms(present), FlatLeaves([leaf.value for leaf in present])
        for bucket in whole_buckets([form.count for form in forms], [dtype(form) for form in forms], limit):
            yield bucket, flats.of(bucket)

    def _rows(self, buffer: Array, root: int | None) -> Any:
        """Every rank's buffer, [ranks, elements], where it is wanted."""
        if root is not None:
            return self._communicator.gather(root, buffer)
        return self._communicator.all_gather(buffer, [buffer.size] * self._communicator.size).reshape(
            self._communicator.size, -1
        )


def _forms(present: Sequence[Leaf]) -> list[Form]:
    return [leaf.form for leaf in present if leaf.form is not None]


def _divided(sums: Array, by: float) -> Array:
    divided: Array = np.divide(sums, by, out=sums)
    return divided


def _tree(tree: Tree, present: Sequence[Leaf], flat: Sequence[Array], rank: int | None = None) -> Tree:
    """Return the tree around new values; a leaf is None if there is no value, or `rank` had none."""
    by_path = {
        leaf.path: leaf.form.leaf_of(values)
        for leaf, values in zip(present, flat, strict=True)
        if leaf.form is not None and rank not in leaf.absent
    }
    return rebuilt(tree, by_path.get)
