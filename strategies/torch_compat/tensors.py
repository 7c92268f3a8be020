"""Trees of tensors, operations on lists of tensors, and the tensors and optimizers of this process."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "foreach_add_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sign_",
    "live_objects",
    "module_contents",
    "own_modules",
    "own_parameters",
    "replace_modules",
    "sparse_indices",
    "storage_number",
    "swap_tensors",
    "transient_buffers",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_to",
    "tree_unflatten",
    "version_of",
]

Kind = TypeVar("Kind")

foreach_add_, foreach_mul_, foreach_sign_ = torch._foreach_add_, torch._foreach_mul_, torch._foreach_sign_
foreach_lerp, foreach_lerp_, foreach_norm = torch._foreach_lerp, torch._foreach_lerp_, torch._foreach_norm


def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensors are, so that whoever holds one of them holds the other from now on."""
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def tree_to(device: torch.device, tree: Any) -> Any:
    """Return a tree of values with its tensors on a device; those in page-locked memory are copied beside the host."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), tree)


def live_objects(kind: type[Kind]) -> list[Kind]:
    """Return this process's objects of a class, in the order in which the garbage collector lists them."""
    # The class is asked, not the object: lazy modules import things when `isinstance` looks at their `__class__`.
    return [item for item in gc.get_objects() if issubclass(type(item), kind)]


def storage_number(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's storage, which views share; fake and meta tensors have one too."""
    number: int = tensor.untyped_storage()._cdata
    return number


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def sparse_indices(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices of a sparse tensor as they are, with those that occur several times."""
    return tensor._indices()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module itself keeps its parameters; tied ones are in it under each name."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict in which a module itself keeps its children."""
    return module._modules


def replace_modules(module: nn.Module, children: dict[str, nn.Module | None]) -> dict[str, nn.Module | None]:
    """Give a module other children, and return those it had."""
    before, module._modules = module._modules, children
    return before


def module_contents(module: nn.Module) -> dict[str, Any]:
    """Return what a module keeps its parameters, buffers and children in, by attribute, for one that shares them."""
    return {name: vars(module)[name] for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")}


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set
