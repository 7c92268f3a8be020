"""Layers whose weights the ranks of a tp group share, and the collectives with gradients between them.

Megatron-LM's two ways to split a linear layer (Shoeybi et al. 2019, arXiv:1909.08053, section 3): by columns every rank
makes some of the outputs, by rows some of the terms of all of them. A column layer followed by a row layer takes one
all-reduce in forward and one in backward; where ranks split the sequence between such pairs, an all-gather and a
reduce-scatter take their place (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from strategies.errors import CannotRun
from strategies.parallel.ranks import (
    SEQUENCE,
    TensorRanks,
    copy_to_ranks,
    gather_from_ranks,
    scatter_sum,
    split_between_ranks,
    start_sum,
    sum_over_ranks,
    wait_for,
)
from strategies.parallel.split import Split, hold_part, note_split


class _OverlappedLinear(Function):
    """A column layer's product, whose input gradient is all-reduced while the gradient of its weight is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranks: TensorRanks
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranks, ctx.has_bias = ranks, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        on_its_way = start_sum(gradient @ weight, ctx.ranks)
        rows = gradient.reshape(-1, gradient.shape[-1])
        for_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        for_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return wait_for(on_its_way), for_weight, for_bias, None


# Linear layers and the vocabulary. The first three are what a module's own class is derived from.


class Columns(nn.Module):
    """A linear layer, weight [out, in] or Conv1D's [in, out], of which this rank has some of the outputs."""

    ranks: TensorRanks
    is_transposed = False
    copies_input = True
    """Whether the layer all-reduces the gradient of its input; else what calls it does that for several at once."""
    gathers_sequence = False
    """Whether the input is this rank's part of the sequence, to be all-gathered here."""
    gathered_length = 0
    """All outputs, where they are all-gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs [..., this rank's] (all of them where they are gathered) from inputs [..., in]."""
        ranks = self.ranks
        if ranks.is_whole:
            return super().forward(x)  # type: ignore[no-any-return]
        if self.gathers_sequence:
            y: torch.Tensor = super().forward(gather_from_ranks(x, ranks, SEQUENCE, sums=True))
        elif self.copies_input and self._overlaps(x):
            y = self._overlapped(x)
        else:
            y = super().forward(copy_to_ranks(x, ranks) if self.copies_input else x)
        return gather_from_ranks(y, ranks, -1, length=self.gathered_length) if self.gathered_length else y

    def _overlaps(self, x: torch.Tensor) -> bool:
        weight: Any = self.weight
        return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad

    def _overlapped(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight.t() if self.is_transposed else self.weight  # type: ignore[operator]
        bias: Any = self.bias
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _OverlappedLinear.apply(x, weight, bias, self.ranks)  # type: ignore[no-untyped-call,no-any-return]


class Rows(nn.Module):
    """A linear layer of which this rank has some of the inputs; the bias, which all have, is added to the sum."""

    ranks: TensorRanks
    is_transposed = False
    splits_input = False
    """Whether every rank is given all inputs."""
    splits_sequence = False
    """Whether the output is this rank's part of the sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs [..., out] from inputs [..., this rank's], or all inputs where the layer splits them."""
        if self.ranks.is_whole:
            return super().forward(x)  # type: ignore[no-any-return]
        if self.splits_input:
            x = split_between_ranks(x, self.ranks, -1)
        weight: Any = self.weight.t() if self.is_transposed else self.weight  # type: ignore[operator]
        y = functional.linear(x, weight)
        y = scatter_sum(y, self.ranks, SEQUENCE) if self.splits_sequence else sum_over_ranks(y, self.ranks)
        bias: Any = self.bias
        return y if bias is None else y + bias.to(y.dtype)


class VocabularyRows(nn.Module):
    """An embedding of which this rank has some of the rows."""

    ranks: TensorRanks
    first = 0
    """The token of this rank's first row."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., width] of tokens [...]."""
        if self.ranks.is_whole:
            return super().forward(tokens)  # type: ignore[no-any-return]
        weight: Any = self.weight
        own = tokens - self.first
        absent = (own < 0) | (own >= weight.shape[0])
        vectors: torch.Tensor = super().forward(own.masked_fill(absent, 0))
        return sum_over_ranks(vectors.masked_fill(absent.unsqueeze(-1), 0), self.ranks)


class ColumnParallelLinear(Columns, nn.Linear):
    """`nn.Linear` with outputs split over the ranks of a group; a seed gives the values of `nn.Linear`.

    Args:
        gather_output: give all outputs, [..., out_features], on every rank; else this rank's, as `RowParallelLinear`
            takes them.
        fused: how many outputs belong to each of several products that one weight makes (query, key and value): each
            is split over the ranks. None: one product.
        group: the ranks that share the layer; None: all of the job, or, before it is joined, none: the layer is whole
            until `dsplan.initialize` splits it over the tp ranks of its plan.

    Raises:
        CannotRun: the outputs do not divide over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        fused: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if gather_output and fused is not None:
            raise CannotRun(
                "ColumnParallelLinear: outputs of fused products are not gathered; leave out one of the two"
            )
        self.gathered_length = out_features if gather_output else 0
        self.fused = tuple(fused or (out_features,))
        self.split_over(TensorRanks(group))

    def split_over(self, ranks: TensorRanks) -> None:
        """Leave this rank's part of a layer that is whole; raises as the constructor does."""
        pieces = split_pieces(self.fused, ranks, type(self).__name__)
        self.ranks = ranks
        split_in_place(self, {"weight": 0, "bias": 0}, pieces)


class RowParallelLinear(Rows, nn.Linear):
    """`nn.Linear` with inputs split over the ranks of a group; the bias, which every rank has, is added once.

    It starts from the values that `nn.Linear` has under the same seed.

    Args:
        split_input: every rank is given all inputs, [..., in_features], and takes its own.
        group: as of `ColumnParallelLinear`.

    Raises:
        CannotRun: the inputs do not divide over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        split_input: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.splits_input = split_input
        self.split_over(TensorRanks(group))

    def split_over(self, ranks: TensorRanks) -> None:
        """Leave this rank's part of a layer that is whole; raises as the constructor does."""
        pieces = split_pieces((self.in_features,), ranks, type(self).__name__)
        self.ranks = ranks
        split_in_place(self, {"weight": 1}, pieces)


class VocabParallelEmbedding(VocabularyRows, nn.Embedding):
    """`nn.Embedding` with rows split over the ranks of a group; the last ranks may have a row less.

    It starts from the values that `nn.Embedding` has under the same seed.

    Args:
        group: as of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.split_over(TensorRanks(group))

    def split_over(self, ranks: TensorRanks) -> None:
        """Leave this rank's rows of a table that is whole."""
        self.ranks = ranks
        split_vocabulary(self)


def split_pieces(lengths: Sequence[int], ranks: TensorRanks, what: str) -> tuple[tuple[int, int], ...]:
    """Return the rank's equal range of each of several blocks that lie one after the other along a dimension.

    Raises:
        CannotRun: a block does not divide over the ranks.
    """
    pieces, start = [], 0
    for length in lengths:
        if length % ranks.size:
            raise CannotRun(f"{what}: {length} does not divide over {ranks.size} ranks; use a tp that divides it")
        first, end = ranks.share(length)
        pieces.append((start + first, start + end))
        start += length
    return tuple(pieces)


def split_in_place(
    module: nn.Module, dims: dict[str, int], pieces: tuple[tuple[int, int], ...], *, copies: int = 1
) -> dict[str, Split]:
    """Leave a rank's pieces of parameters, by name in the module and dimension; what is not there is skipped."""
    splits = {}
    for name, dim in dims.items():
        parameter = getattr(module, name, None)
        if isinstance(parameter, torch.Tensor):
            split = Split(
                shape=tuple(parameter.shape), dim=dim % parameter.dim(), pieces=pieces, over="tp", copies=copies
            )
            hold_part(parameter, split)
            note_split(module, name, split)
            splits[name] = split
    return splits


def split_vocabulary(table: Any) -> dict[str, Split]:
    """Leave a rank's rows of an embedding that is `VocabularyRows`."""
    first, end = table.ranks.share(table.weight.shape[0])
    table.first = first
    if table.padding_idx is not None:
        table.padding_idx = table.padding_idx - first if first <= table.padding_idx < end else None
    return split_in_place(table, {"weight": 0}, ((first, end),))


SharedLayer = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
"""The layers that a script has itself; whole ones are split by `dsplan.initialize`."""


# Blocks of a model of one's own.


class ParallelAttention(nn.Module):
    """Megatron's split of self-attention: every rank has some of the heads; one all-reduce in forward and backward.

    Args:
        width: of inputs and outputs.
        heads: of queries; `key_heads` of keys and values, None: as many. Both divide over the ranks.
        dropout: of attention weights, while training.
        group: as of `ColumnParallelLinear`.

    Raises:
        CannotRun: heads do not divide over the ranks, or the width over the heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        bias: bool = True,
        is_causal: bool = True,
        dropout: float = 0.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        key_heads = key_heads or heads
        ranks = TensorRanks(group).size
        if width % heads or heads % key_heads or heads % ranks or key_heads % ranks:
            raise CannotRun(
                f"ParallelAttention: width {width}, heads {heads} and key heads {key_heads} do not divide over each"
                f" other and {ranks} ranks; use a tp that divides the heads"
            )
        self.head_width, self.is_causal, self.dropout = width // heads, is_causal, dropout
        keys = key_heads * self.head_width
        self.qkv = ColumnParallelLinear(width, width + 2 * keys, bias, fused=(width, keys, keys), group=group)
        self.out = RowParallelLinear(width, width, bias, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs [samples, length, width] from inputs of the same shape, alike on every rank."""
        ranks = 1 if self.qkv.ranks.is_whole else self.qkv.ranks.size
        query, key, value = (
            product.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for product in self.qkv(x).split([width // ranks for width in self.qkv.fused], dim=-1)
        )
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, dropout_p=dropout
        )
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class ParallelMLP(nn.Module):
    """Megatron's split of the MLP: every rank has some of the inner units; one all-reduce in forward and backward.

    Args:
        width: of inputs and outputs.
        inner: how many units lie between; they divide over the ranks.
        is_gated: the units are activation(gate) * up, as Llama's are.
        group: as of `ColumnParallelLinear`.

    Raises:
        CannotRun: the inner units do not divide over the ranks.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu,
        is_gated: bool = False,
        bias: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        fused = (inner, inner) if is_gated else (inner,)
        self.activation, self.is_gated = activation, is_gated
        self.up = ColumnParallelLinear(width, sum(fused), bias, fused=fused, group=group)
        self.down = RowParallelLinear(inner, width, bias, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs [..., width] from inputs of the same shape, alike on every rank."""
        units = self.up(x)
        if self.is_gated:
            gate, units = units.chunk(2, dim=-1)
            return self.down(self.activation(gate) * units)  # type: ignore[no-any-return]
        return self.down(self.activation(units))  # type: ignore[no-any-return]


class LayerSplit(nn.Module):
    """The naive split of a model by layers: every rank has the next few, and works while the others wait.

    Called on every rank with the same inputs; every rank is given the output, and the gradient of the inputs. All
    layers map tensors to tensors; `layers` are whole on every rank, which keeps its own under their numbers.

    Args:
        group: the ranks that share the layers; None: all of the job.

    Raises:
        CannotRun: there are fewer layers than ranks.
    """

    def __init__(self, layers: Iterable[nn.Module], *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.ranks = TensorRanks(group)
        whole = list(layers)
        if len(whole) < self.ranks.size:
            raise CannotRun(f"LayerSplit: {len(whole)} layers for {self.ranks.size} ranks; use fewer ranks")
        first, end = self.ranks.share(len(whole))
        self.layers = nn.ModuleDict({str(number): whole[number] for number in range(first, end)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        if self.ranks.rank > 0 or (self.ranks.size > 1 and x.requires_grad):
            # Gradients go back to the rank before also where the inputs, tokens say, want none.
            anchor = torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())
            x = _FromPrevious.apply(x, anchor, self.ranks)  # type: ignore[no-untyped-call]
        for layer in self.layers.values():
            x = layer(x)
        return _ToNext.apply(x, self.ranks) if self.ranks.size > 1 else x  # type: ignore[no-untyped-call]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


class _FromPrevious(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks, ctx.like = ranks, (x.shape, x.dtype, x.device)
        return x.view_as(x) if ranks.rank == 0 else _receive(ranks, ranks.rank - 1, x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ranks: TensorRanks = ctx.ranks
        shape, dtype, device = ctx.like
        if ranks.rank > 0:
            _send(gradient, ranks, ranks.rank - 1)
            gradient = torch.empty(shape, dtype=dtype, device=device)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        gradient = gradient.contiguous()
        dist.broadcast(gradient, _global(ranks, 0), group=ranks.group)
        return gradient, None, None


class _ToNext(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.ranks = ranks
        last = ranks.size - 1
        if ranks.rank < last:
            _send(x, ranks, ranks.rank + 1)
            return _receive(ranks, last, x.device)
        for rank in range(last):
            _send(x, ranks, rank)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ranks: TensorRanks = ctx.ranks
        if ranks.rank == ranks.size - 1:
            return gradient, None
        return _receive(ranks, ranks.rank + 1, gradient.device), None


def _send(values: torch.Tensor, ranks: TensorRanks, rank: int) -> None:
    """Send a tensor with its shape and dtype, which the receiver does not know."""
    to = _global(ranks, rank)
    header = [values.dim(), _DTYPES.index(values.dtype), *values.shape]
    sizes = torch.tensor([*header, *[0] * (10 - len(header))], device=values.device)
    dist.send(sizes, to, group=ranks.group)
    dist.send(values.detach().contiguous(), to, group=ranks.group)


def _receive(ranks: TensorRanks, rank: int, device: torch.device) -> torch.Tensor:
    sizes = torch.empty(10, dtype=torch.int64, device=device)
    dist.recv(sizes, _global(ranks, rank), group=ranks.group)
    dims, dtype, *shape = sizes.tolist()
    values = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
    dist.recv(values, _global(ranks, rank), group=ranks.group)
    return values


def _global(ranks: TensorRanks, rank: int) -> int:
    assert ranks.group is not None
    return dist.get_global_rank(ranks.group, rank)
