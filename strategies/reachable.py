"""Every tensor that Python's garbage collector knows of, and which of them lie on a disk."""

from __future__ import annotations

import gc
from weakref import WeakValueDictionary

import torch

MAPPED_FILES: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Views of files on a disk, by the address of their storage."""


def on_disk(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of such a file, so that the kernel may take its memory back at any time."""
    return tensor.untyped_storage().data_ptr() in MAPPED_FILES


def reachable_tensors() -> list[torch.Tensor]:
    """The tensors, and their gradients, which no other object may hold."""
    # The class is asked, not the object: lazy modules import things when `isinstance` looks at their `__class__`.
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    gradients = [item.grad for item in found if item.is_leaf and item.grad is not None]
    return [*found, *gradients]
