"""The whole model, of which ranks have different parts: what they know together, whole tensors, and norms.

Experts lie on ep ranks, parts of layers on tp ranks and blocks on pp ranks; what data-parallel ranks share is not
looked at here. Every rank calls each of these together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from strategies.parallel.mesh import Group, Mesh
from strategies.parallel.split import ModelParts, Split

Value = TypeVar("Value")


def gathered(value: Value, mesh: Mesh, groups: tuple[Group, ...] = ("ep", "pp")) -> list[Value]:
    """The values of all ranks that differ from this one in their places in `groups` alone, stages in order.

    Without tp: its ranks have parts of the same names.
    """
    values = [value]
    for name in groups:
        if mesh.size(name) > 1:
            box: list[Any] = [None] * mesh.size(name)
            dist.all_gather_object(box, values, group=mesh.group(name))
            values = [member for members in box for member in members]
    return values


def share_of_square(name: str, parts: ModelParts, mesh: Mesh, shards: int = 1) -> float:
    """What a rank's square of a gradient counts for in a sum over all ranks, of which several may have the same.

    Args:
        shards: how many ranks share the states of one part of it.
    """
    if not parts.is_counted(name):
        return 0.0
    spread = mesh.size("ep") if name in parts.experts else mesh.size("tp") // parts.copy_of(name)[1]
    return spread * shards * mesh.size("pp") / mesh.dims.world_size


def whole_tensors(tensors: Mapping[str, torch.Tensor], parts: ModelParts, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The whole model's tensors on every rank, in host memory, from those that this rank has whole or a part of.

    What has the shape of the whole is taken as it is, though `parts` may have it split.
    """
    found: dict[str, torch.Tensor] = {}
    tied = {id(tensors[name]): split for name, split in parts.splits.items() if name in tensors}
    for name, tensor in tensors.items():
        split = tied.get(id(tensor))
        # Where layers are open (`ModelParts.opened`) they are whole already.
        is_whole = split is None or tuple(tensor.shape) == tuple(split.shape)
        whole = tensor.detach() if split is None or is_whole else _whole(tensor.detach(), split, mesh)
        found[name] = whole.to("cpu", copy=True)
    for group in ("ep", "pp"):
        if mesh.size(group) > 1:
            found = _exchanged(found, mesh, group)
    return found


def _whole(part: torch.Tensor, split: Split, mesh: Mesh) -> torch.Tensor:
    """A whole tensor from the parts of the ranks that split it."""
    group = mesh.group(split.over)
    everyones = gathered(split.pieces, mesh, (split.over,))
    whole = part.new_empty(split.shape)
    for rank, pieces in enumerate(everyones):
        theirs = Split(shape=split.shape, dim=split.dim, pieces=pieces, over=split.over)
        values = part.contiguous() if rank == mesh.rank(split.over) else part.new_empty(theirs.local_shape)
        dist.broadcast(values, dist.get_global_rank(group, rank), group=group)
        for region in theirs.regions((0,) * part.dim(), values.shape):
            target, source = (
                tuple(slice(low, low + size) for low, size in zip(lows, region.sizes, strict=True))
                for lows in (region.whole, region.local)
            )
            whole[target] = values[source]
    return whole


def _exchanged(own: dict[str, torch.Tensor], mesh: Mesh, name: Group) -> dict[str, torch.Tensor]:
    """What the ranks of a group have, each tensor from the first that has it."""
    group, device = mesh.group(name), mesh.environment.device
    everyones = gathered([(key, value.dtype, value.shape) for key, value in own.items()], mesh, (name,))
    found: dict[str, torch.Tensor] = {}
    for rank, theirs in enumerate(everyones):
        for key, dtype, shape in theirs:
            if key in found:
                continue
            is_own = rank == mesh.rank(name)
            value = own[key].to(device) if is_own else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(value, dist.get_global_rank(group, rank), group=group)
            found[key] = own[key] if is_own else value.cpu()
    return found
