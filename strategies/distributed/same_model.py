"""Whether all ranks hold the same model, before the first collective over its tensors.

A model that one rank builds otherwise makes collectives of other sizes, which hang, or mix what does not belong
together. DDP compares shapes for that reason; here every strategy does, by name. What travels is a hash of 32 bytes
per rank, and descriptions only where hashes differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strategies.errors import CannotRun

_MOST_RANKS_NAMED = 8


def require_same_model(model: nn.Module) -> None:
    """Compare names, shapes and dtypes of parameters and buffers over all ranks, and which of them are trained.

    Every rank of the process group calls this together.

    Raises:
        CannotRun: they differ; the same line on every rank names who differs and the first difference.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = _described(model)
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, hashlib.sha256("\n".join(own).encode()).digest())
    if len(set(hashes)) == 1:
        return
    usual, odd = _split(hashes)
    dist.broadcast_object_list(there := [own], src=odd[0])
    dist.broadcast_object_list(elsewhere := [own], src=usual)
    named = ", ".join(map(str, odd[:_MOST_RANKS_NAMED])) + (" ..." if len(odd) > _MOST_RANKS_NAMED else "")
    who = f"rank {named} has" if len(odd) == 1 else f"ranks {named} have"
    raise CannotRun(
        f"{who} another model than rank {usual}: {_difference(there[0], elsewhere[0], odd[0], usual)}; build the same"
        " model on every rank"
    )


def _split(hashes: Sequence[bytes]) -> tuple[int, list[int]]:
    """The first rank of the most that agree, of those with rank 0 where as many do, and the ranks that differ."""
    counts = Counter(hashes)  # in the order of ranks, and `max` takes the first of equals
    most = max(counts, key=lambda digest: counts[digest])
    return hashes.index(most), [rank for rank, digest in enumerate(hashes) if digest != most]


def _described(model: nn.Module) -> list[str]:
    """A line for every tensor of the model, in its order; the part before the colon is the tensor's name."""
    parameters = (f"{name}: {_form(parameter)}, {_use(parameter)}" for name, parameter in model.named_parameters())
    return [*parameters, *(f"{name}: {_form(buffer)}, a buffer" for name, buffer in model.named_buffers())]


def _use(parameter: nn.Parameter) -> str:
    return "trained" if parameter.requires_grad else "frozen"


def _form(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "of no shape yet"
    # DeepSpeed leaves an empty tensor where it has split a parameter.
    shape = getattr(tensor, "ds_shape", tensor.shape)
    return f"{list(shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _difference(odd: Sequence[str], usual: Sequence[str], rank: int, other: int) -> str:
    """The first difference of two descriptions, in words."""
    both = zip(odd, usual, strict=False)
    at = next((at for at, (line, expected) in enumerate(both) if line != expected), min(len(odd), len(usual)))
    if at >= len(odd):
        return f"it has no {_name(usual[at])}"
    if at >= len(usual):
        return f"that of rank {other} has no {_name(odd[at])}"
    if _name(odd[at]) == _name(usual[at]):
        return f"{odd[at]} on rank {rank}, {usual[at].partition(': ')[2]} on rank {other}"
    return f"its tensor {at + 1} is {odd[at]} on rank {rank}, {usual[at]} on rank {other}"


def _name(line: str) -> str:
    return line.rpartition(": ")[0]
