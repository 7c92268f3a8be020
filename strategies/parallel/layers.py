"""Layers that ranks split between them, and the exchanges between them that autograd follows.

Megatron-LM's way (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a layer split by its outputs followed by one split
by its inputs takes one all-reduce in forward and one in backward. With sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2) an all-gather and a reduce-scatter take its place.

Layers hold plain parameters of their own part; `strategies.parallel.split` says where they lie in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from strategies.errors import CannotRun
from strategies.parallel.split import even_split, hold_part, note_split

Group = dist.ProcessGroup | None
"""Ranks that split layers between them; None for all ranks of the job."""
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Exchanges, with what autograd does on the way back.


def copy_to_ranks(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """A tensor that all ranks have, used by each for its part: gradients are added up over the ranks."""
    copied: torch.Tensor = _Copy.apply(whole, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over_ranks(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' terms, on every rank."""
    total: torch.Tensor = _Sum.apply(part, group)  # type: ignore[no-untyped-call]
    return total


def gather(
    part: torch.Tensor,
    dim: int,
    group: Group,
    *,
    sums_gradients: bool = False,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """The ranks' parts of a tensor one after the other along `dim`, on every rank.

    Args:
        sums_gradients: each rank goes on to use it for a part of the work, so that its gradient is one term of the
            whole one and the terms are added up; else all ranks have the same gradient and each keeps its part of it.
        lengths: of the ranks' parts, where they are not equal.
    """
    whole: torch.Tensor = _Gather.apply(part, dim % part.dim(), group, sums_gradients, lengths)  # type: ignore[no-untyped-call]
    return whole


def own_part(whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's equal part along `dim` of a tensor that all ranks have; its gradient is gathered."""
    part: torch.Tensor = _Split.apply(whole, dim % whole.dim(), group)  # type: ignore[no-untyped-call]
    return part


def reduce_scatter(terms: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's equal part along `dim` of the sum of the ranks' terms."""
    part: torch.Tensor = _ReduceScatter.apply(terms, dim % terms.dim(), group)  # type: ignore[no-untyped-call]
    return part


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, dim: int, group: Group, sums_gradients: bool, lengths: Sequence[int] | None
    ) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.sums, ctx.lengths = dim, group, sums_gradients, lengths
        return _gathered(part, dim, group, lengths)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.sums and ctx.lengths is None:
            return _scattered(gradient, ctx.dim, ctx.group), None, None, None, None
        if ctx.sums:
            gradient = _summed(gradient, ctx.group)
        if ctx.lengths is None:
            own = _equal_part(gradient, ctx.dim, ctx.group)
        else:
            rank = dist.get_rank(ctx.group)
            own = gradient.narrow(ctx.dim, sum(ctx.lengths[:rank]), ctx.lengths[rank])
        return own.contiguous(), None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _equal_part(whole, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gathered(gradient, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(terms, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gathered(gradient, ctx.dim, ctx.group), None, None


def _summed(terms: torch.Tensor, group: Group) -> torch.Tensor:
    total = terms.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _equal_part(whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    length, rest = divmod(whole.shape[dim], ranks)
    if rest:
        raise CannotRun(
            f"dimension {dim} of a tensor {list(whole.shape)} is to be split over {ranks} ranks, which do not divide"
            " it; pad sequences to a multiple of tp, or leave sequence parallelism off"
        )
    return whole.narrow(dim, dist.get_rank(group) * length, length)


def _scattered(terms: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    own = _equal_part(terms, dim, group)  # checks that the ranks divide it
    stacked = terms.movedim(dim, 0).contiguous()
    part = torch.empty_like(own.movedim(dim, 0), memory_format=torch.contiguous_format)
    _reduce_scatter(part, stacked, group=group)
    return part.movedim(0, dim).contiguous()


def _gathered(part: torch.Tensor, dim: int, group: Group, lengths: Sequence[int] | None = None) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    longest = part.shape[dim] if lengths is None else max(lengths)
    stacked = part.movedim(dim, 0)
    if part.shape[dim] < longest:
        stacked = torch.cat((stacked, stacked.new_zeros(longest - part.shape[dim], *stacked.shape[1:])))
    whole = stacked.new_empty(ranks * longest, *stacked.shape[1:])
    _all_gather(whole, stacked.contiguous(), group=group)
    if lengths is not None:
        whole = torch.cat([rows[:length] for rows, length in zip(whole.chunk(ranks), lengths, strict=True)])
    return whole.movedim(0, dim).contiguous()


# Layers for blocks of one's own.


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank makes some of the outputs.

    Inputs, [..., in_features], are whole on every rank. Weights are drawn whole, as `nn.Linear` draws them, from a seed
    that must be the same on every rank, and each keeps its part.

    Args:
        fused: how many products of equal width the outputs are (3 for query, key and value in one): each of them is
            split over the ranks.
        gather_output: outputs are whole on every rank, [..., out_features]; else its part, [..., out_features / ranks],
            as `RowParallelLinear` wants it.
        group: the ranks that share in the layer; None: all.

    Raises:
        CannotRun: the ranks do not divide the outputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fused: int = 1,
        gather_output: bool = False,
        group: Group = None,
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.gather_output, self.group, self.fused, self.copies_input = gather_output, group, fused, True
        _hold(self, "weight", 0, group, fused)
        if bias:
            _hold(self, "bias", 0, group, fused)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = copy_to_ranks(input, self.group) if self.copies_input else input
        outputs = functional.linear(here, self.weight, self.bias)
        if not self.gather_output:
            return outputs
        whole = gather(outputs, -1, self.group)
        if self.fused == 1:
            return whole
        ranks = dist.get_world_size(self.group)
        by_product = whole.view(*whole.shape[:-1], ranks, self.fused, -1).transpose(-3, -2)
        return by_product.reshape(whole.shape)


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank makes a term of all outputs, from some of the inputs.

    Args:
        input_is_parallel: inputs are this rank's part, [..., in_features / ranks], as `ColumnParallelLinear` leaves
            them; else they are whole.
        group: the ranks that share in the layer; None: all.

    Raises:
        CannotRun: the ranks do not divide the inputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        group: Group = None,
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.input_is_parallel, self.group, self.scatters_sequence = input_is_parallel, group, False
        self.sums_terms = True
        _hold(self, "weight", 1, group, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = input if self.input_is_parallel else own_part(input, -1, self.group)
        terms = functional.linear(here, self.weight)
        if not self.sums_terms:
            outputs = terms
        elif self.scatters_sequence:
            outputs = reduce_scatter(terms, 1, self.group)
        else:
            outputs = sum_over_ranks(terms, self.group)
        return outputs if self.bias is None else outputs + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """A table of which each rank has some rows; the vectors that it gives are whole on every rank.

    Raises:
        CannotRun: the ranks do not divide the rows.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, group: Group = None, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.group = group
        _hold(self, "weight", 0, group, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_embedding(input, self.weight, self.group)


def vocab_parallel_embedding(
    ids: torch.Tensor, rows: torch.Tensor, group: Group, first: int | None = None
) -> torch.Tensor:
    """Vectors, [*ids, width], of token ids from a table of which each rank has the `rows` from `first` on."""
    begin = dist.get_rank(group) * rows.shape[0] if first is None else first
    here = ids - begin
    is_elsewhere = (here < 0) | (here >= rows.shape[0])
    vectors = functional.embedding(here.masked_fill(is_elsewhere, 0), rows)
    return sum_over_ranks(vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: Group = None,
    *,
    first: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """`functional.cross_entropy` of logits of which each rank has some classes, without gathering them.

    Args:
        logits: [tokens, classes of this rank].
        labels: [tokens], classes of the whole vocabulary.
        first: this rank's first class; None where all ranks have equally many.
        reduction: mean (over labels that count), sum or none ([tokens]).
    """
    begin = dist.get_rank(group) * logits.shape[-1] if first is None else first
    losses: torch.Tensor = _CrossEntropy.apply(logits, labels, group, begin, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """Losses per token, [tokens]; keeps the softmax of this rank's classes for backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, first: int, ignore_index: int
    ) -> torch.Tensor:
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        largest = wide.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shares = (wide - largest.unsqueeze(-1)).exp_()
        here = labels - first
        is_elsewhere = (here < 0) | (here >= logits.shape[-1])
        place = here.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        of_label = wide.gather(-1, place).squeeze(-1) - largest
        sums = torch.stack((shares.sum(dim=-1), of_label.masked_fill(is_elsewhere, 0.0)))
        dist.all_reduce(sums, group=group)
        total, of_label = sums.unbind()
        counts = labels != ignore_index
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, place, is_elsewhere, counts)
        ctx.dtype = logits.dtype
        return (total.log() - of_label).masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, place, is_elsewhere, counts = ctx.saved_tensors
        ones = (~is_elsewhere).to(shares.dtype).unsqueeze(-1)
        slopes = shares.scatter_add(-1, place, -ones)
        slopes.mul_((gradient * counts).unsqueeze(-1))
        return slopes.to(ctx.dtype), None, None, None, None


def _hold(module: nn.Module, name: str, dim: int, group: Group, fused: int) -> None:
    """Keep this rank's part of a parameter that was drawn whole."""
    parameter = getattr(module, name)
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    try:
        split = even_split(parameter.shape, dim, rank=rank, ranks=ranks, fused=fused)
    except ValueError as problem:
        raise CannotRun(f"{type(module).__name__}: {problem}; use a width that they divide, or fewer ranks") from None
    if ranks > 1:
        hold_part(parameter, split)
        note_split(module, name, split)


def widths(total: int, ranks: int) -> Sequence[int]:
    """How many of `total` rows each rank has where they need not divide: the first ranks have one more."""
    each, more = divmod(total, ranks)
    return [each + (rank < more) for rank in range(ranks)]
