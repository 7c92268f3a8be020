"""What a checkpoint of our ZeRO holds: each rank its pieces of whole named tensors, from the master copies.

Masters lose nothing to 16 bits, and strategies that keep fp32 weights go on from the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.states import Place, States
from strategies.zero.held import Held
from strategies.zero.optimizer import Pieces


class ZeroStates(States):
    """A module in buckets and an optimizer of pieces."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, pieces: Pieces, held: Held) -> None:
        super().__init__(module, optimizer)
        self._pieces, self._held = pieces, held
        self._parts: dict[torch.Tensor, PartOfTensor] = {}
        for bucket, slot in pieces.slots():
            piece = pieces.of[slot.parameter].detach().reshape(-1)
            self._parts[slot.parameter] = PartOfTensor(piece, slot.parameter.shape, bucket.own_start(slot))
        for bucket in held.fixed:
            for slot in bucket.slots:
                start, stop = bucket.own_range(slot)
                run = bucket.part[start:stop]
                self._parts[slot.parameter] = PartOfTensor(run, slot.parameter.shape, bucket.own_start(slot))

    def weight(self, tensor: torch.Tensor) -> Any:
        return self._parts.get(tensor, tensor.detach())

    def places(self) -> Iterator[Place]:
        groups = {piece: group for group in self.optimizer.param_groups for piece in group["params"]}
        names = self.names.of_parameters()
        for bucket, slot in self._pieces.slots():
            piece = self._pieces.of[slot.parameter]
            if piece in groups:
                yield Place(
                    name=names[slot.parameter],
                    group=groups[piece],
                    tensor=piece,
                    shape=slot.parameter.shape,
                    start=bucket.own_start(slot) if bucket.is_divided else None,
                )

    def updated(self) -> None:
        self._held.updated()
