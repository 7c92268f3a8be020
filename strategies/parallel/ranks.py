"""The ranks that share each layer, and the collectives with gradients between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    `uneven` is by how much more than the mean comes to it where others choose what they send.
    """

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
        """Return the rank's range (first, end) of `length` rows; the first ranks have one more of a remainder."""
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
    """All-reduce values in place, without a gradient; one rank alone has them already."""
    return wait_for(start_sum(values, ranks, kind))


def start_sum(values: torch.Tensor, ranks: TensorRanks, kind: str = "sum") -> torch.Tensor:
    """Start a sum of a tensor that nobody else reads until it is waited for."""
    return _ops().all_reduce_(values.contiguous(), kind, _name(ranks))  # type: ignore[no-any-return]


def wait_for(values: torch.Tensor) -> torch.Tensor:
    """Wait for a sum that was started."""
    return _ops().wait_tensor(values)  # type: ignore[no-any-return]


def _ops() -> Any:
    return functional_collectives()


def _name(ranks: TensorRanks) -> str:
    assert ranks.group is not None
    name: str = ranks.group.group_name
    return name


def _all_gather(part: torch.Tensor, ranks: TensorRanks, dim: int, length: int) -> torch.Tensor:
    """Lay the ranks' parts side by side along a dimension that is `length` long as a whole."""
    sizes = [end - first for first, end in (_share(length, ranks.size, rank) for rank in range(ranks.size))]
    rows = part.movedim(dim, 0)
    if part.shape[dim] < sizes[0]:
        rows = torch.cat((rows, rows.new_zeros((sizes[0] - part.shape[dim], *rows.shape[1:]))))
    whole = wait_for(_ops().all_gather_into_tensor(rows.contiguous(), ranks.size, _name(ranks)))
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
    return wait_for(_ops().reduce_scatter_tensor(rows, "sum", ranks.size, _name(ranks))).movedim(0, dim).contiguous()


# Collectives with gradients. What all ranks compute alike has, on every rank, its whole gradient.


def copy_to_ranks(values: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Pass on what every rank has, before each computes a part with it: the gradients of the parts are all-reduced."""
    return values if ranks.is_whole else with_gradient(values, _alike, lambda g: all_reduce(g.clone(), ranks))


def sum_over_ranks(values: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """All-reduce the ranks' terms; the gradient is that of the sum."""
    return values if ranks.is_whole else with_gradient(values, lambda v: all_reduce(v.clone(), ranks), lambda g: g)


def gather_from_ranks(
    part: torch.Tensor, ranks: TensorRanks, dim: int, *, length: int | None = None, sums: bool = False
) -> torch.Tensor:
    """All-gather the ranks' parts along a dimension, `length` as a whole (None: this part's times the ranks).

    With `sums` ranks compute different parts with the result, so that its gradients are reduce-scattered; else each
    takes its own part of the gradient, which is alike everywhere.
    """
    if ranks.is_whole:
        return part
    whole, axis = part.shape[dim] * ranks.size if length is None else length, dim % part.dim()
    back = _reduce_scatter if sums else _own
    return with_gradient(part, lambda v: _all_gather(v, ranks, axis, whole), lambda g: back(g, ranks, axis))


def split_between_ranks(values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """Take the rank's part of what all have along a dimension; the gradients of the parts are all-gathered."""
    return _take_part(values, ranks, dim % values.dim(), _own)


def scatter_sum(values: torch.Tensor, ranks: TensorRanks, dim: int) -> torch.Tensor:
    """Reduce-scatter the ranks' terms: the rank's part, along a dimension that divides, of their sum."""
    return _take_part(values, ranks, dim % values.dim(), _reduce_scatter)


def _take_part(
    values: torch.Tensor,
    ranks: TensorRanks,
    dim: int,
    take: Callable[[torch.Tensor, TensorRanks, int], torch.Tensor],
) -> torch.Tensor:
    if ranks.is_whole:
        return values
    length = values.shape[dim]
    return with_gradient(values, lambda v: take(v, ranks, dim), lambda g: _all_gather(g, ranks, dim, length))


def with_gradient(
    values: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return `forward(values)`, a tensor of its own, whose gradient `backward` makes the gradient of `values`."""
    return _WithGradient.apply(values, forward, backward)  # type: ignore[no-untyped-call,no-any-return]


class _WithGradient(Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward: Any, backward: Any) -> Any:
        ctx.back = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None


def _alike(values: torch.Tensor) -> torch.Tensor:
    return values.view_as(values)
