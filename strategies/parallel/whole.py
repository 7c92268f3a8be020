"""The whole model, of which ranks have different parts: what they know together, whole tensors, and norms.

Experts lie on ep ranks, parts of layers on tp ranks and blocks on pp ranks; what data-parallel ranks share is not
looked at here. Every rank calls each of these together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.parallel.mesh import Group, Mesh
from strategies.parallel.ranks import TensorRanks, all_reduce, gather_from_ranks
from strategies.parallel.split import ModelParts, Split, parts_of

Value = TypeVar("Value")


def gathered(value: Value, mesh: Mesh, groups: tuple[Group, ...] = ("ep", "pp")) -> list[Value]:
    """Return the values of all ranks that differ from this one in their places in `groups` alone, stages in order.

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
    """Return what a rank's square of a gradient counts for in a sum over all, of whom several may have the same.

    So many ranks as `shards` share the states of one part of it.
    """
    if not parts.is_counted(name):
        return 0.0
    spread = mesh.size("ep") if name in parts.experts else mesh.size("tp") // parts.copy_of(name)[1]
    return spread * shards * mesh.size("pp") / mesh.dims.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Traits that parameters side by side in a bucket of ZeRO share where ranks split the model between them."""

    share: float = 1.0
    """What the square of a rank's gradient counts for in the sum over all ranks."""
    is_expert: bool = False
    """True if ep ranks have others of them, so that fewer ranks share their states."""
    is_summed: bool = False
    """True if each tp rank has a term of their gradients only."""
    copies: int = 1
    """How many tp ranks, neighbours, have the same part of them and a term each of their gradients."""
    shared: str = ""
    """The name that a checkpoint has for a weight which several pipeline stages have."""


def kinds_of(named: Iterable[tuple[str, nn.Parameter]], parts: ModelParts, mesh: Mesh) -> dict[nn.Parameter, Kind]:
    """Return what the parameters of a model that ranks split share buckets by: how they count, and travel.

    Names are those of the whole model's state dict.
    """
    kinds: dict[nn.Parameter, Kind] = {}
    for name, parameter in named:
        is_expert = name in parts.experts
        kinds[parameter] = Kind(
            share=share_of_square(name, parts, mesh, mesh.size("expert_shard" if is_expert else "dp_shard_cp")),
            is_expert=is_expert,
            is_summed=name in parts.summed,
            copies=parts.splits[name].copies if name in parts.splits else 1,
            shared=parts.shared.get(name, ""),
        )
    return kinds


def whole_tensors(tensors: Mapping[str, torch.Tensor], parts: ModelParts, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return the whole model's tensors on every rank, in host memory, from what each has whole or a part of.

    What has the shape of the whole is taken as it is, though `parts` may have it split.
    """
    wholes: dict[str, torch.Tensor] = {}
    tied = {id(tensors[name]): split for name, split in parts.splits.items() if name in tensors}
    for name, tensor in tensors.items():
        split = tied.get(id(tensor))
        # Where layers are open (`ModelParts.opened`) they are whole already.
        is_whole = split is None or tuple(tensor.shape) == tuple(split.shape)
        whole = tensor.detach() if split is None or is_whole else _join_parts(tensor.detach(), split, mesh)
        wholes[name] = whole.to("cpu", copy=True)
    for group in ("ep", "pp"):
        if mesh.size(group) > 1:
            wholes = _exchange(wholes, mesh, group)
    return wholes


def _join_parts(part: torch.Tensor, split: Split, mesh: Mesh) -> torch.Tensor:
    """Build a whole tensor from the parts of the ranks that split it."""
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


def _exchange(own: dict[str, torch.Tensor], mesh: Mesh, name: Group) -> dict[str, torch.Tensor]:
    """Return what the ranks of a group have, each tensor from the first that has it."""
    group, device = mesh.group(name), mesh.environment.device
    everyones = gathered([(key, value.dtype, value.shape) for key, value in own.items()], mesh, (name,))
    tensors: dict[str, torch.Tensor] = {}
    for rank, theirs in enumerate(everyones):
        for key, dtype, shape in theirs:
            if key in tensors:
                continue
            is_own = rank == mesh.rank(name)
            value = own[key].to(device) if is_own else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(value, dist.get_global_rank(group, rank), group=group)
            tensors[key] = own[key] if is_own else value.cpu()
    return tensors


# Layers that tp ranks split.


def sum_over_copies(part: torch.Tensor, split: Split, ranks: TensorRanks) -> torch.Tensor:
    """Return the sum of the gradients of the ranks that have the same pieces of a parameter."""
    if split.copies == 1:
        return part
    parts = gather_from_ranks(part.detach().unsqueeze(0), ranks, 0)
    first = ranks.rank // split.copies * split.copies
    return parts[first : first + split.copies].sum(0)


def sum_copies(model: nn.Module, parts: ModelParts, mesh: Mesh) -> None:
    """Add up the gradients of the parameters of which several tp ranks have the same part."""
    ranks = TensorRanks(mesh.group("tp"))
    for name, parameter in model.named_parameters():
        split = parts.splits.get(name)
        if split is None or split.over != "tp" or split.copies == 1 or parameter.grad is None:
            continue
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradient.copy_(sum_over_copies(gradient.to(mesh.environment.device), split, ranks))


@contextmanager
def whole_layers(model: nn.Module, mesh: Mesh, *, keeps_changes: bool) -> Iterator[None]:
    """Make parameters that tp ranks have parts of whole inside; `keeps_changes` takes over what the first wrote."""
    parts = parts_of(model)
    splits = {name: split for name, split in parts.splits.items() if split.over == "tp"}
    named = dict(model.named_parameters(remove_duplicate=False))
    sharded = {named[name]: (named[name].data, split) for name, split in splits.items() if name in named}
    ranks = TensorRanks(mesh.group("tp"))
    for parameter, (part, split) in sharded.items():
        parameter.data = _assemble(part, split, ranks)
    with ExitStack() as opened:
        for make in parts.opened:
            opened.enter_context(make())
        yield
    for parameter in dict.fromkeys(model.parameters()) if keeps_changes else ():
        dist.broadcast(parameter.data, dist.get_global_rank(mesh.group("tp"), 0), group=mesh.group("tp"))
    for parameter, (part, split) in sharded.items():
        if keeps_changes:
            part.copy_(split.take(parameter.data))
        parameter.data = part


def _assemble(part: torch.Tensor, split: Split, ranks: TensorRanks) -> torch.Tensor:
    whole = part.new_zeros(split.shape)
    if ranks.rank % split.copies == 0:
        start = 0
        for first, end in split.pieces:
            whole.narrow(split.dim, first, end - first).copy_(part.narrow(split.dim, start, end - first))
            start += end - first
    return all_reduce(whole, ranks)
