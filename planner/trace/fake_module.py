"""A copy of a module whose weights are fake."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_copy(
    module: nn.Module, blocks: Sequence[nn.Module], mode: FakeTensorMode, dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The module with fake CPU tensors for its weights and buffers, and the copies of `blocks`; shared weights stay
    shared.

    Floating-point tensors become `dtype` where it is not None, as `module.to(dtype)` would make them. The original may
    be on any device, also `meta`, and is left as it is.
    """
    stand_ins: dict[int, object] = {}
    for weight in module.parameters():
        stand_ins[id(weight)] = nn.Parameter(_fake(mode, weight, dtype), requires_grad=weight.requires_grad)
    for buffer in module.buffers():
        stand_ins[id(buffer)] = _fake(mode, buffer, dtype)
    # A deep copy takes what it has already seen from its memo.
    made = copy.deepcopy(module, stand_ins)
    copies = [stand_ins[id(block)] for block in blocks]
    return made, tuple(block for block in copies if isinstance(block, nn.Module))


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
