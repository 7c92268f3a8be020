"""Parts of whole parameters that a rank's module holds, where ranks split a model between them.

Modules hold plain parameters of their own part; what is here says where it lies in the whole. Checkpoints, clipping and
gradients read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from strategies.parallel.empty import is_stand_in, stand_in

_PARTS, _SPLITS = "_dsplan_parts", "_dsplan_splits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A box of a part, and where the same elements begin in the whole parameter."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Layout of a rank's part in a whole parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    """The dimension along which it is split, from 0."""
    pieces: tuple[tuple[int, int], ...]
    """Ranges (first, end) of the whole along `dim` which, one after the other, are the part: several where products are
    fused (query, key and value; gate and up)."""
    over: Literal["tp", "ep"]
    """The group whose ranks have the other parts. A range may be on several ranks (keys of fewer heads than ranks)."""
    copies: int = 1
    """How many ranks, neighbours in the group, have these same pieces: their gradients are to be summed, and count once
    in norms."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part."""
        length = sum(end - first for first, end in self.pieces)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of the part of a whole tensor of `shape`."""
        parts = [whole.narrow(self.dim, first, end - first) for first, end in self.pieces]
        return torch.cat(parts, dim=self.dim)

    def regions(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Region]:
        """Return where a box of the part lies in the whole: one region for each piece that it meets."""
        begin, stop, passed = offsets[self.dim], offsets[self.dim] + sizes[self.dim], 0
        for first, end in self.pieces:
            low, high = max(begin, passed), min(stop, passed + end - first)
            if low < high:
                yield Region(
                    local=_with(offsets, self.dim, low),
                    whole=_with(offsets, self.dim, first + low - passed),
                    sizes=_with(sizes, self.dim, high - low),
                )
            passed += end - first


def even_split(shape: Sequence[int], dim: int, *, rank: int, ranks: int, fused: int = 1, over: str = "tp") -> Split:
    """Return the rank's equal share of a dimension of `fused` equal blocks, each of which is split over the ranks.

    Raises:
        ValueError: the dimension does not divide.
    """
    dim %= len(shape)
    block, rest = divmod(shape[dim], fused)
    share, left = divmod(block, ranks)
    if rest or left:
        raise ValueError(f"dimension {dim} of {list(shape)} does not divide into {fused} x {ranks} parts")
    starts = [index * block + rank * share for index in range(fused)]
    pieces = tuple((start, start + share) for start in starts)
    return Split(shape=tuple(shape), dim=dim, pieces=pieces, over="ep" if over == "ep" else "tp")


@dataclass(kw_only=True, slots=True)
class ModelParts:
    """Parts of the whole model that a rank's module is; names are those of the whole model's state dict."""

    splits: dict[str, Split] = field(default_factory=dict)
    """Parameters (and buffers) of which this rank has a part."""
    summed: set[str] = field(default_factory=set)
    """Parameters that every tp rank has whole and whose gradients each has a part of: to be summed over tp."""
    experts: set[str] = field(default_factory=set)
    """Parameters of routed experts that ep ranks split: reduced and sharded over `expert_dp` and `expert_shard`."""
    shared: dict[str, str] = field(default_factory=dict)
    """Weights that another pipeline stage has too, with the name under which a checkpoint holds them (tied
    embeddings): gradients are summed over the stages that have them."""
    opened: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)
    """Contexts in which modules compute alone, with parameters that the caller has made whole."""
    blocks: tuple[range, ...] | None = None
    """The blocks of each of this rank's pipeline stages; None without a pipeline."""
    tp: tuple[int, int] = (0, 1)
    """Which of how many tp ranks this one is: they all have the same of what is not split."""

    def copy_of(self, name: str) -> tuple[int, int]:
        """Return which of how many tp ranks that have the same of a parameter this one is."""
        split = self.splits.get(name)
        if name in self.experts or (split is not None and split.over == "ep"):
            return 0, 1
        return self.tp if split is None else (self.tp[0] % split.copies, split.copies)

    def is_counted(self, name: str) -> bool:
        """Return whether this stage counts a parameter, and writes it where stages have parts of their own."""
        return self.shared.get(name, name) == name

    @property
    def is_whole(self) -> bool:
        """True if the module is the whole model after all."""
        return not (self.splits or self.summed or self.experts or self.shared) and self.blocks is None


def parts_of(module: nn.Module) -> ModelParts:
    """Return what a module is of the whole model; of one that was not split, the whole."""
    parts = module.__dict__.get(_PARTS)
    return parts if isinstance(parts, ModelParts) else ModelParts(splits=splits_in(module))


def note_parts(module: nn.Module, parts: ModelParts) -> None:
    """Have `parts_of` find the parts of a model that ranks split."""
    module.__dict__[_PARTS] = parts


def note_split(module: nn.Module, name: str, split: Split) -> None:
    """Note on the module that has a parameter which part of the whole one it is."""
    module.__dict__.setdefault(_SPLITS, {})[name] = split


def splits_in(model: nn.Module) -> dict[str, Split]:
    """Return the splits that modules carry, by the parameters' names in the model."""
    splits: dict[str, Split] = {}
    for prefix, module in model.named_modules():
        for name, split in module.__dict__.get(_SPLITS, {}).items():
            splits[f"{prefix}.{name}" if prefix else name] = split
    return splits


def hold_part(parameter: torch.Tensor, split: Split) -> None:
    """Make a whole parameter this rank's part of it, in place: optimizers that have it go on having it."""
    if is_stand_in(parameter):
        parameter.data = stand_in(split.local_shape, parameter.dtype, parameter.device)
    else:
        parameter.data = split.take(parameter.data)


def _with(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
