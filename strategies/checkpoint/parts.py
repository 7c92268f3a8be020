"""Parts of tensors in checkpoints: whatever a rank has of a tensor, written as boxes of the whole named tensor.

A run of elements is no box of its tensor in general, but at most 2d - 1 of them for d dimensions: the rest of a row,
whole rows, the beginning of a row. What ranks split between them (`strategies/parallel/split.py`) is a box for each of
its pieces, and a run or a row shard of that is the boxes in which both meet. `torch.distributed.checkpoint` reads any
box from any others, so that what is written in runs can be read whole, in rows, or in other runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from strategies.parallel.split import Split
from strategies.torch_compat.sharding import compute_local_shape_and_global_offset

ALL = "all"
"""The one key at the top of what torch is handed: it logs and wraps every key there, 0.4 ms each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box of a tensor: where it begins, its size, and where its elements begin in the flat run."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the elements `start` to `stop` of a contiguous tensor of `shape`, as boxes in their order."""
    if start >= stop:
        return
    if not shape:
        yield Box(offsets=(), sizes=(), start=0)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start, stop) != (first * row, (first + 1) * row):
        yield from _within(shape, first, start, stop, taken=0)
        return
    whole_from, whole_to = -(-start // row), stop // row
    if start < whole_from * row:
        yield from _within(shape, first, start, whole_from * row, taken=0)
    if whole_from < whole_to:
        rest, begin = tuple(shape[1:]), whole_from * row - start
        yield Box(offsets=(whole_from, *(0 for _ in rest)), sizes=(whole_to - whole_from, *rest), start=begin)
    if whole_to * row < stop:
        yield from _within(shape, last, whole_to * row, stop, taken=whole_to * row - start)


def _within(shape: Sequence[int], row: int, start: int, stop: int, *, taken: int) -> Iterator[Box]:
    """Yield the boxes of a run that lies in one row."""
    size = math.prod(shape[1:])
    for box in boxes(shape[1:], start - row * size, stop - row * size):
        yield Box(offsets=(row, *box.offsets), sizes=(1, *box.sizes), start=taken + box.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a whole tensor, and the values that this rank has of it, [sizes], which are read in place."""

    offsets: tuple[int, ...]
    values: torch.Tensor


class PartOfTensor:
    """Part that this rank has of a tensor of `shape`, in the terms of `torch.distributed.checkpoint`; maybe nothing.

    `tensor` is what has it: a run of elements, a part that ranks split, or a DTensor of one. Where `writes` is false
    another rank writes the same values, in boxes that may be cut elsewhere, and this one only reads.
    """

    def __init__(
        self, tensor: torch.Tensor, shape: Sequence[int], pieces: Sequence[Piece], *, writes: bool = True
    ) -> None:
        self.tensor, self.shape, self.writes = tensor.detach(), torch.Size(shape), writes
        self.pieces = {piece.offsets: piece.values for piece in pieces}

    @classmethod
    def of_run(
        cls, run: torch.Tensor, shape: Sequence[int], start: int, *, split: Split | None = None, writes: bool = True
    ) -> PartOfTensor:
        """Take the elements [n] from `start` on of a tensor of `shape`, or of the part that a split leaves here."""
        flat = run.detach()
        local = shape if split is None else split.local_shape
        pieces: list[Piece] = []
        for box in boxes(local, start, start + flat.numel()):
            values = flat[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
            whole = [Piece(offsets=box.offsets, values=values)]
            pieces += whole if split is None else _split(values, box.offsets, split)
        return cls(flat, shape, pieces, writes=writes)

    @classmethod
    def of_split(cls, part: torch.Tensor, split: Split) -> PartOfTensor:
        """Take the part of a tensor that a split leaves here, whole or as a DTensor that more ranks share."""
        part = part.detach()
        local, offsets = part, (0,) * part.dim()
        if isinstance(part, DTensor):
            local = part.to_local()
            _, offsets = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        return cls(part, split.shape, list(_split(local, tuple(offsets), split)) if local.numel() else ())

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.shape

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in (self.__create_chunk_list__() if self.writes else ())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=values.shape)
            for offsets, values in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.pieces[tuple(index.offset or ())]


def pieces_of(part: Any) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
    """Yield the values that a rank has of a whole tensor, in place, each with its box of the whole.

    `part` is a `PartOfTensor`, a DTensor, or the whole tensor.
    """
    if isinstance(part, PartOfTensor):
        pieces = [(offsets, values) for offsets, values in part.pieces.items()]
    elif isinstance(part, DTensor):
        _, offsets = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        pieces = [(tuple(offsets), part.to_local())]
    else:
        pieces = [((0,) * part.dim(), part)]
    for offsets, values in pieces:
        yield values, tuple(slice(low, low + long) for low, long in zip(offsets, values.shape, strict=True))


def _split(values: torch.Tensor, offsets: Sequence[int], split: Split) -> Iterator[Piece]:
    """Yield the pieces of a box of a split part, which begins at `offsets` of it."""
    for region in split.regions(offsets, values.shape):
        spans = zip(region.local, offsets, region.sizes, strict=True)
        inside = tuple(slice(low - begin, low - begin + size) for low, begin, size in spans)
        yield Piece(offsets=region.whole, values=values[inside])


class SavePlanner(DefaultSavePlanner):
    """Writes whole tensors, DTensors and parts of tensors from the flat dictionary under `ALL`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin with the dictionary under `ALL`."""
        super().set_up_planner(state_dict[ALL], storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what lies in a box."""
        part = _part_at(self.state_dict, index)
        return super().lookup_object(index) if part is None else part


class LoadPlanner(DefaultLoadPlanner):
    """Reads whole tensors, DTensors and parts of tensors into the flat dictionary under `ALL`, and nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin with the dictionary under `ALL`; torch's own way drops values of kinds that it does not know."""
        self.original_state_dict = self.state_dict = state_dict[ALL]
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor that a box is read into."""
        part = _part_at(self.state_dict, index)
        return super().lookup_tensor(index) if part is None else part


def _part_at(state: Mapping[str, Any], index: MetadataIndex) -> torch.Tensor | None:
    """Return the box of a `PartOfTensor`; None for everything else, which torch looks up itself."""
    value = state.get(index.fqn)
    return value.__get_tensor_shard__(index) if isinstance(value, PartOfTensor) else None
