"""The ranks that share each layer, and the collectives with gradients between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from strategies.errors import CannotRun
from strategies.torch_compat.distributed import functional_collectives

SEQUENCE = 1
"""The dimension of activations, [samples, length, width], that sequence parallelism splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImaginedGroup:
    """So many ranks of which only the first is there, in a trace: on fake tensors collectives make shapes alone.
    `uneven` is by how much more than the mean comes to it where others choose what they send."""

    size: int
    uneven: float = 1.0
    group_name: str = "imagined"


class TensorRanks:
    """The ranks that share each layer, and this one's place among them; `group` None: all of the job.

    While `is_whole` the layers hold whole weights and work alone, as `open_layers` has them do.
    """

    def __init__(self, group: dist.ProcessGroup | ImaginedGroup | None = None) -> None:
        self.group: Any
        if isinstance(group, ImaginedGroup):
            self.group, self.size, self.rank = group, group.size, 0
        else:
            joined = dist.is_available() and dist.is_initialized()
            self.group = dist.group.WORLD if group is None and joined else group
            self.size = dist.get_world_size(self.group) if self.group is not None else 1
            self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.is_whole = self.size == 1

    def __deepcopy__(self, memo: object) -> TensorRanks:
        return self  # process groups have no copies

    def share(self, length: int) -> tuple[int, int]:
        """This rank's range (first, end) of `length` rows; the first ranks have one more where it does not divide."""
        return _share(length, self.size, self.rank)

    @contextmanager
    def open_layers(self) -> Iterator[None]:
        """Layers inside work alone, on weights that the caller has made whole."""
        before, self.is_whole = self.is_whole, True
        try:
            yield
        finally:
            self.is_whole = before


def _share(length: int, ranks: int, rank: int) -> tuple[int, int]:
    each, more = divmod(length, ranks)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def tokens_of_each(length: int, ranks: int) -> int:
    """Tokens of a sample that each of the ranks that share it has: two equal chunks.

    Raises:
        CannotRun: the sample does not divide into two chunks per rank.
    """
    if length % (2 * ranks):
        raise CannotRun(
            f"cp {ranks} cuts samples into {2 * ranks} parts, and {length} tokens are no multiple of that; pad the"
            " samples"
        )
    return length // ranks


# Collectives without gradients.


def all_reduce(values: torch.Tensor, ranks: TensorRanks, kind: str = "sum") -> torch.Tensor:
    return waited_for(started_sum(values, ranks, kind))


def started_sum(values: torch.Tensor, ranks: TensorRanks, kind: str = "sum") -> torch.Tensor:
    """A sum on its way, of a tensor that nobody else reads until it is waited for."""
    return _ops().all_reduce_(values.contiguous(), kind, _name(ranks))  # type: ignore[no-any-return]


def waited_for(values: torch.Tensor) -> torch.Tensor:
    return _ops().wait_tensor(values)  # type: ignore[no-any-return]


def _ops() -> Any:
    return functional_collectives()


def _name(ranks: TensorRanks) -> str:
    assert ranks.group is not None
    name: str = ranks.group.group_name
    return name


def _all_gather(part: torch.Tensor, ranks: TensorRanks, dim: int, length: int) -> torch.Tensor:
    """The ranks' parts side by side along a dimension that is `length` long as a whole."""
    sizes = [end - first for first, end in (_share(length, ranks.size, rank) for rank in range(ranks.size))]
    rows = part.movedim(dim, 0)
    if part.shape[dim] < sizes[0]:
        rows = torch.cat((rows, rows.new_zeros((sizes[0] - part.shape[dim], *rows.shape[1:]))))
    whole = waited_for(_ops().all_gather_into_tensor(rows.contiguous(), ranks.size, _name(ranks)))
    if sizes[0] != sizes[-1]:
        runs: tuple[torch.Tensor, ...] = torch.split(whole, sizes[0])
        whole = torch.cat([run[:size] for run, size in zip(runs, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _own(values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    first, end = ranks.share(values.shape[dim])
    return values.narrow(dim, first, end - first).contiguous()


def _reduce_scatter(values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    if values.device.type == "cpu":  # gloo's own is an all-reduce too, and older ones have none
        return _own(all_reduce(values.clone(), ranks), ranks, dim)
    rows = values.movedim(dim, 0).contiguous()
    return waited_for(_ops().reduce_scatter_tensor(rows, "sum", ranks.size, _name(ranks))).movedim(0, dim).contiguous()


# Collectives with gradients. What all ranks compute alike has, on every rank, its whole gradient.


def copy_to_ranks(values: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """What every rank has, before each computes a part with it: the gradients of the parts are all-reduced."""
    return values if ranks.is_whole else _Copy.apply(values, ranks)  # type: ignore[no-untyped-call]


def sum_over_ranks(values: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """The ranks' terms all-reduced; the gradient is that of the sum."""
    return values if ranks.is_whole else _Sum.apply(values, ranks)  # type: ignore[no-untyped-call]


def gather_from_ranks(
    part: torch.Tensor, ranks: TensorRanks, dim: int, *, length: int | None = None, sums: bool = False
) -> torch.Tensor:
    """The ranks' parts all-gathered along a dimension.

    Args:
        length: of the whole dimension; None: that of this part times the number of ranks.
        sums: ranks compute different parts with the result, so that its gradients are reduce-scattered; else each rank
            takes its own part of the gradient, which is alike everywhere.
    """
    if ranks.is_whole:
        return part
    length = part.shape[dim] * ranks.size if length is None else length
    return _Gather.apply(part, ranks, dim % part.dim(), length, sums)  # type: ignore[no-untyped-call,no-any-return]


def split_between_ranks(values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """This rank's part of what all have along a dimension; the gradients of the parts are all-gathered."""
    return values if ranks.is_whole else _Part.apply(values, ranks, dim % values.dim())  # type: ignore[no-untyped-call]


def scatter_sum(values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """This rank's part, along a dimension that divides, of the sum of the ranks' terms: a reduce-scatter."""
    return values if ranks.is_whole else _Scatter.apply(values, ranks, dim % values.dim())  # type: ignore[no-untyped-call]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient.clone(), ctx.ranks), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        return all_reduce(values.clone(), ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: TensorRanks, dim: int, length: int, sums: bool) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.sums = ranks, dim, sums
        return _all_gather(part, ranks, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = _reduce_scatter if ctx.sums else _own
        return back(gradient, ctx.ranks, ctx.dim), None, None, None, None


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.length = ranks, dim, values.shape[dim]
        return _own(values, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_gather(gradient, ctx.ranks, ctx.dim, ctx.length), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.length = ranks, dim, values.shape[dim]
        return _reduce_scatter(values, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_gather(gradient, ctx.ranks, ctx.dim, ctx.length), None, None
