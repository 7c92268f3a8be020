"""What ranks compute with split layers, beside the same layers whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import dsplan
from strategies.errors import CannotRun
from strategies.parallel.ranks import _reduce_scatter


def _gradients_alike(split: nn.Module, whole: nn.Module) -> float:
    """The largest difference of a gradient from this rank's part of the whole layer's."""
    parts = {
        f"{prefix}.{name}".strip("."): part
        for prefix, module in split.named_modules()
        for name, part in getattr(module, "splits", {}).items()
    }
    worst = 0.0
    for (name, here), there in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        expected = parts[name].take(there.grad) if name in parts else there.grad
        worst = max(worst, float((here.grad - expected).abs().max()))
    return worst


def _compared(split: nn.Module, whole: nn.Module, x: torch.Tensor) -> float:
    """The largest difference in outputs and gradients of a split module from the whole one with the same weights."""
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine, expected = split(here), whole(there)
    for loss in (mine, expected):
        (loss * torch.arange(loss.shape[-1])).square().mean().backward()
    assert here.grad is not None
    assert there.grad is not None
    worst = max(float((mine - expected).abs().max()), float((here.grad - there.grad).abs().max()))
    return max(worst, _gradients_alike(split, whole))


def _start(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def linear_layers() -> dict[str, float]:
    """Differences of column, row, and column and row layers from `nn.Linear`s."""
    parallel = dsplan.parallel
    x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(1))
    made: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
        "column": (
            lambda: parallel.ColumnParallelLinear(12, 24, gather_output=True),
            lambda: nn.Linear(12, 24),
        ),
        "row": (lambda: parallel.RowParallelLinear(12, 24, split_input=True), lambda: nn.Linear(12, 24)),
        "both": (
            lambda: nn.Sequential(
                parallel.ColumnParallelLinear(12, 24), nn.GELU(), parallel.RowParallelLinear(24, 12, bias=False)
            ),
            lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12, bias=False)),
        ),
    }
    return {name: _compared(_start(split), _start(whole), x) for name, (split, whole) in made.items()}


class _Attention(nn.Module):
    """`ParallelAttention` on one rank, written out."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.keys = key_heads * 4
        self.qkv, self.out = nn.Linear(24, 24 + 2 * self.keys), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split((24, self.keys, self.keys), dim=-1)
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 2 * 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate) * up)


def blocks() -> dict[str, float]:
    """Differences of Megatron's split of attention, with as many key heads and fewer, and of MLPs."""
    generator = torch.Generator().manual_seed(1)
    wide, narrow = torch.randn(2, 5, 24, generator=generator), torch.randn(3, 12, generator=generator)
    found = {
        f"attention {heads}": _compared(
            _start(lambda heads=heads: dsplan.parallel.ParallelAttention(24, 6, key_heads=heads)),
            _start(lambda heads=heads: _Attention(heads)),
            wide,
        )
        for heads in (6, 2)
    }
    gated = _start(lambda: dsplan.parallel.ParallelMLP(12, 16, is_gated=True))
    return {**found, "gated": _compared(gated, _start(_Gated), narrow)}


def vocabulary(length: int) -> dict[str, float]:
    """Differences of a table, a head and a loss over a vocabulary of any length from whole ones."""
    parallel = dsplan.parallel
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, length, (3, 6), generator=generator)
    targets = torch.randint(0, length, (3, 6), generator=generator)
    targets[0, :2] = -100
    table = _start(lambda: parallel.VocabParallelEmbedding(length, 8, padding_idx=3))
    whole = _start(lambda: nn.Embedding(length, 8, padding_idx=3))
    mine, expected = table(tokens), whole(tokens)
    scores = torch.randn(length, 8, generator=generator)
    first, end = table.ranks.share(length)
    part = scores[first:end].clone().requires_grad_()
    head = scores.clone().requires_grad_()
    found = {"table": float((mine - expected).abs().max())}
    local = dsplan.parallel.copy_to_ranks(mine, table.ranks) @ part.t()
    losses = {}
    for kind in ("sum", "none", "mean"):
        here = parallel.vocab_parallel_cross_entropy(local, targets, vocabulary=length, reduction=kind)
        there = functional.cross_entropy((expected @ head.t()).flatten(0, 1), targets.flatten(), reduction=kind)
        losses[kind] = float(((here.flatten() - there.flatten()) / there.abs().clamp(min=1)).abs().max())
    here.backward()
    there.backward()
    assert part.grad is not None
    assert head.grad is not None
    found["head gradient"] = float((part.grad - head.grad[first:end]).abs().max())
    return {**found, **losses, "table gradient": _gradients_alike(table, whole)}


def sequence_parts() -> dict[str, float]:
    """Differences of gathers, splits and sums of parts of a sequence, and of their gradients, from what they undo."""
    parallel, rank, ranks = dsplan.parallel, dist.get_rank(), dist.get_world_size()
    group = parallel.TensorRanks()
    x = torch.randn(2, 2 * ranks, 3, generator=torch.Generator().manual_seed(1))
    own = slice(2 * rank, 2 * rank + 2)

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> Any:
        given = given.clone().requires_grad_()
        out = function(given)
        (out * (rank + 1)).sum().backward()
        return out.detach(), given.grad

    each = torch.ones(1)
    split, split_back = gradient(lambda v: parallel.split_between_ranks(v, group, 1), x)
    whole, whole_back = gradient(lambda v: parallel.gather_from_ranks(v, group, 1, sums=True), x[:, own])
    total, total_back = gradient(lambda v: parallel.scatter_sum(v, group, 1), x)
    numbers = torch.arange(1, ranks + 1).repeat_interleave(2).view(1, -1, 1).expand_as(x).float()
    return {
        "split": float((split - x[:, own]).abs().max() + (split_back - numbers).abs().max()),
        "gather": float((whole - x).abs().max() + (whole_back - each * ranks * (ranks + 1) / 2).abs().max()),
        "scatter": float((total - ranks * x[:, own]).abs().max() + (total_back - numbers).abs().max()),
        "raw": float((_reduce_scatter(x, group, 1) - ranks * x[:, own]).abs().max()),
    }


def layers_on_ranks_of(tokens: bool) -> tuple[float, list[str]]:
    """Difference of layers that lie on different ranks from the same on one, and this rank's names of them."""

    def layers() -> list[nn.Module]:
        first: nn.Module = nn.Embedding(9, 6) if tokens else nn.Linear(6, 6)
        return [first, *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))]

    torch.manual_seed(5)
    whole = layers()
    torch.manual_seed(5)
    split = dsplan.parallel.LayerSplit(layers())
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 9, (4,), generator=generator) if tokens else torch.randn(4, 6, generator=generator)
    here, there = x.clone().requires_grad_(not tokens), x.clone().requires_grad_(not tokens)
    mine, expected = split(here), nn.Sequential(*whole)(there)
    mine.square().sum().backward()
    expected.square().sum().backward()
    worst = float((mine - expected).abs().max())
    if not tokens:
        worst = max(worst, float((here.grad - there.grad).abs().max()))
    for number, layer in split.layers.items():
        for mine, other in zip(layer.parameters(), whole[int(number)].parameters(), strict=True):
            worst = max(worst, float((mine.grad - other.grad).abs().max()))
    return worst, list(split.layers)


def refusal_of_odd_width() -> str:
    """What a layer says whose outputs do not divide."""
    try:
        dsplan.parallel.ColumnParallelLinear(4, 5)
    except CannotRun as problem:
        return str(problem)
    return ""
