"""The storage that `torch.distributed.checkpoint` plans for: safetensors files of each rank and a list of their boxes.

torch decides which rank writes which box of which tensor and which boxes a rank reads; here is how boxes lie in files.
Planning and writing are separate: a `RankFile` holds what is to be written when torch has finished, so that the bytes
may be written later, by another thread, from a copy. A rank has one, and several of limited size for an object store.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from strategies.checkpoint.content import Index
from strategies.checkpoint.reading import Damaged, fill, header_of, opened, shown
from strategies.checkpoint.safefile import DTYPES, Entry, FileSum, bytes_of, cut, lay_out, write
from strategies.errors import BrokenFile, DsplanError
from strategies.run_directory.heartbeat import beat

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_SLAB_BYTES = 2**25
"""How much of a file is in memory at a time where it cannot be read in place."""


def file_of(rank: int, number: int = 0) -> str:
    """Return the name of a rank's file in a checkpoint's folder, and of its further ones."""
    return f"rank-{rank:05d}{f'-{number:05d}' if number else ''}.safetensors"


def is_ranks_file(name: str) -> bool:
    """Return whether a file has the name of a rank's."""
    return re.fullmatch(r"rank-\d{5,}(-\d{5,})?\.safetensors", name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """File of one rank: its entries and, by key, where their values are to be had."""

    name: str
    entries: Sequence[Entry] = ()
    values: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of the data section."""
        return self.entries[-1].end if self.entries else 0

    def copy_to(self, buffer: torch.Tensor) -> None:
        """Copy all values to a buffer of bytes, [self.bytes], which is then the file's data section."""
        for entry in self.entries:
            value = self.values[entry.key]().detach()
            run = buffer[entry.begin : entry.end].view(entry.dtype).view(entry.shape)
            run.copy_(value, non_blocking=True)

    def write_to(self, folder: Path, copied: torch.Tensor | None, *, durable: bool = True) -> FileSum:
        """Write the file, from a buffer that `copy_to` filled or else from the values; see `safefile.write`.

        Raises:
            OSError: it cannot be written.
        """
        data = self._pieces() if copied is None else iter((bytes_of(copied),))
        return write(folder / self.name, self.entries, data, {"format": "pt"}, durable)

    def _pieces(self) -> Iterator[memoryview]:
        for entry in self.entries:
            yield bytes_of(self.values[entry.key]())


class _AsPlanned:
    """The steps of torch's protocol at which a storage changes nothing of a plan, for reading and for writing."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Writer(_AsPlanned, StorageWriter):
    """Takes torch's plan for this rank; `files` is what to write, `index` (rank 0's) where every box will lie.

    A file has at most `limit_bytes`, or one box; None: the rank has one file.
    """

    def __init__(self, rank: int, limit_bytes: int | None = None) -> None:
        self.files = [RankFile(name=file_of(rank))]
        self.index: dict[str, Any] = {}
        self._rank, self._limit_bytes = rank, limit_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Note what the plan has this rank write."""
        items = {}
        for item in plan.items:
            data = item.tensor_data
            assert data is not None, f"{item.index.fqn} is no tensor"
            key = _key(item.index.fqn, data.chunk, data.size)
            items[key] = (item, data.properties.dtype, tuple(data.chunk.sizes))
        entries = lay_out((key, dtype, shape) for key, (_, dtype, shape) in items.items())
        values = {key: _later(planner, item) for key, (item, _, _) in items.items()}
        self.files = [
            RankFile(name=file_of(self._rank, number), entries=part, values=values)
            for number, part in enumerate(cut(entries, self._limit_bytes))
        ]
        results = [
            WriteResult(items[entry.key][0].index, entry.end - entry.begin, (file.name, entry.key))
            for file in self.files
            for entry in file.entries
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note where every rank's boxes will lie."""
        places = {result.index: result.storage_data for written in results for result in written}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            self.index[name] = {
                "dtype": _WORDS[tensor.properties.dtype],
                "shape": list(tensor.size),
                "boxes": [_described(name, chunk, places) for chunk in tensor.chunks],
            }

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is there."""


PlaceOf = Callable[[str], tuple[Path, str]]


class Reader(_AsPlanned, StorageReader):
    """Reads boxes of tensors from the files that an index names; nothing in them is ever run.

    The files lie in a folder, or where `place_of` says: in which directory, and under which name there.
    """

    def __init__(self, folder: Path, index: Index, place_of: PlaceOf | None = None) -> None:
        self._place_of = place_of or (lambda name: (folder, name))
        self._metadata = metadata_of(index)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's terms."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan, file by file."""
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            name, key = self._metadata.storage_data[item.storage_index]
            by_file.setdefault(name, []).append((key, item))
        for name, wanted in by_file.items():
            with BoxFile.open(*self._place_of(name)) as file:
                for key, item in sorted(wanted, key=lambda pair: file.begin_of(pair[0])):
                    target = planner.resolve_tensor(item).detach()
                    file.read(key, tuple(item.storage_offsets), target)
                    planner.commit_tensor(item, target)
                    beat()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: files are opened when they are read."""


class BoxFile:
    """A rank's file, open to be read box by box."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._stored = header_of(file, path)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, name: str) -> Iterator[BoxFile]:
        """Open a file of a folder, or raise `Damaged` where it is no safetensors file."""
        with opened(folder, name) as file:
            yield cls(file, folder / name)

    def begin_of(self, key: str) -> int:
        """Return the byte at which a box begins; 0 for one that is not there."""
        return self._stored[key].begin if key in self._stored else 0

    def read(self, key: str, offsets: Sequence[int], target: torch.Tensor) -> None:
        """Read the part of a box that begins at `offsets` and has the target's shape, a few rows at a time.

        The file may leave out first dimensions of one element: an expert of a stack lies there by itself.

        Raises:
            Damaged: the file has no such box, or no longer.
        """
        stored = self._stored.get(key)
        while stored is not None and target.dim() > len(stored.shape) and target.shape[0] == 1:
            target, offsets = target[0], offsets[1:]
        if stored is None or len(stored.shape) != target.dim():
            raise Damaged(self._path, f"has no {shown(key)}")
        dtype, shape = DTYPES[stored.dtype], stored.shape
        if shape == target.shape and target.dtype == dtype and _is_plain(target):
            self._fill(stored.begin, target)
            return
        if not shape:
            target.copy_(self._rows(stored.begin, (), dtype))
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows = max(1, _SLAB_BYTES // max(1, row_bytes))
        spans = zip(offsets[1:], target.shape[1:], strict=True)
        inner = (slice(None), *(slice(low, low + long) for low, long in spans))
        for row in range(0, target.shape[0], rows):
            part = target[row : row + rows]
            begin = stored.begin + (offsets[0] + row) * row_bytes
            part.copy_(self._rows(begin, (part.shape[0], *shape[1:]), dtype)[inner])

    def _rows(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read elements of the file from a byte on, in host memory."""
        is_bool = dtype == torch.bool
        values = torch.empty(shape, dtype=torch.uint8 if is_bool else dtype)
        self._fill(begin, values)
        return values != 0 if is_bool else values  # other bytes than 0 and 1 are no bool

    def _fill(self, begin: int, values: torch.Tensor) -> None:
        buffer = bytes_of(values)
        self._file.seek(begin)
        for start in range(0, len(buffer), _SLAB_BYTES):
            fill(self._file, self._path, buffer[start : start + _SLAB_BYTES])
            beat()


def _is_plain(target: torch.Tensor) -> bool:
    """Return whether a tensor's memory can take a file's bytes as they are."""
    is_bare = target.device.type == "cpu" and type(target) is torch.Tensor
    return (
        is_bare and target.is_contiguous() and target.dtype != torch.bool and not (target.is_conj() or target.is_neg())
    )


def metadata_of(index: Index) -> Metadata:
    """Return an index in torch's terms."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, tuple[str, str]] = {}
    for name, tensor in index.items():
        chunks = []
        for box in tensor.boxes:
            offsets = torch.Size(box.offsets)
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)))
            places[MetadataIndex(name, offsets)] = (box.file, box.key)
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        tensors[name] = TensorStorageMetadata(properties=properties, size=torch.Size(tensor.shape), chunks=chunks)
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _key(name: str, chunk: ChunkStorageMetadata, size: torch.Size) -> str:
    """Return a tensor's own name where the box is all of it, else with the box: `weight[0:2,16:32]`."""
    if chunk.sizes == size:
        return name
    spans = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{name}[{','.join(f'{offset}:{offset + length}' for offset, length in spans)}]"


def _later(planner: SavePlanner, item: Any) -> Callable[[], torch.Tensor]:
    def resolve() -> torch.Tensor:
        value = planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        return value

    return resolve


def _described(name: str, chunk: ChunkStorageMetadata, places: Mapping[MetadataIndex, tuple[str, str]]) -> Any:
    file, key = places[MetadataIndex(name, chunk.offsets)]
    return {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "key": key}


def carried_out(path: Path, move: Callable[[], object]) -> None:
    """Let torch plan, or read, a checkpoint.

    Raises:
        DsplanError: the first rank's, as it is; BrokenFile with any other first reason.
    """
    with warnings.catch_warnings():
        # A process alone needs no group to write a checkpoint; torch remarks on it every time.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        warnings.filterwarnings("ignore", message="Detected difference in state dict keys", category=UserWarning)
        try:
            move()
        except CheckpointException as problem:
            reason, _ = next(iter(problem.failures.values()))
            if isinstance(reason, DsplanError):
                raise reason from None
            line = next(iter(str(reason).strip().splitlines()), type(reason).__name__)
            raise BrokenFile(path, f"cannot be planned or read ({line})", "name another checkpoint") from problem
