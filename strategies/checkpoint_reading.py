"""Readers of torch's checkpoint format that never run what a file says: limited unpickling, tensors only."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from strategies.errors import BrokenFile

_METADATA = "torch.distributed.checkpoint.metadata"
# Exact names: a module's name would let a file reach everything that module imports.
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("collections", "OrderedDict"),
}


class SafeReader(FileSystemReader):
    """Reads the layout of a checkpoint (`.metadata`) without building anything but torch's metadata classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = f"{self.path}/.metadata"
        try:
            with open(path, "rb") as file:
                metadata: Metadata = _MetadataUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError) as problem:
            raise BrokenFile(
                path, f"is not a checkpoint's metadata ({problem})", "load an earlier checkpoint"
            ) from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors (learning rates, flags) with `weights_only`, so that none of them runs code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as problem:
            name = read_item.dest_index.fqn
            raise BrokenFile(name, f"holds more than plain values ({problem})", "load another checkpoint") from None
        # torch reads the same bytes again without limits; what they build is known to be harmless now.
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
