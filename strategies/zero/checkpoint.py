"""What a checkpoint of our ZeRO holds: the model and its optimizer by whole named tensors, each rank its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from strategies.checkpoint_parts import PartOfTensor
from strategies.zero.optimizer import SCALARS, Pieces
from strategies.zero.partition import Bucket


class ZeroState:
    """Model and optimizer as the nested state that every strategy's checkpoint has.

    Weights are the master copies, so that nothing is lost to 16 bits and strategies that keep fp32 weights go on from
    the same values.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, pieces: Pieces, fixed: Sequence[Bucket]
    ) -> None:
        self._module, self._optimizer, self._pieces = module, optimizer, pieces
        self._starts = {slot.parameter: bucket.own_start(slot) for bucket, slot in pieces.slots()}
        self._weights = {
            slot.parameter: self._part(pieces.of[slot.parameter], slot.parameter) for _, slot in pieces.slots()
        }
        for bucket in fixed:
            for slot in bucket.slots:
                start, stop = bucket.own_range(slot)
                run = bucket.part[start:stop]
                self._weights[slot.parameter] = PartOfTensor(run, slot.parameter.shape, bucket.own_start(slot))

    def named(self) -> dict[str, Any]:
        """What is saved."""
        optimizer: dict[str, Any] = {}
        for name, parameter, group in self._trained():
            piece = self._pieces.of[parameter]
            for key, value in self._optimizer.state.get(piece, {}).items():
                has_shape = isinstance(value, torch.Tensor) and value.shape == piece.shape and key not in SCALARS
                optimizer[f"state.{name}.{key}"] = self._part(value, parameter) if has_shape else value
            for key, value in group.items():
                if key != "params":
                    optimizer[f"param_groups.{name}.{key}"] = value
        return {"model": self._model(), "optimizer": optimizer}

    def expected(self, metadata: Metadata) -> dict[str, Any]:
        """What is read: the model, and the optimizer states that the checkpoint has."""
        optimizer: dict[str, Any] = {}
        for name, parameter, group in self._trained():
            for key, saved in self._saved_states(metadata, name):
                if self._pieces.steps(parameter):
                    optimizer[f"state.{name}.{key}"] = self._room(key, saved, parameter)
            for key in group:
                full = f"param_groups.{name}.{key}"
                if key != "params" and f"optimizer.{full}" in metadata.state_dict_metadata:
                    optimizer[full] = group[key]
        return {"model": self._model(), "optimizer": optimizer}

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Take over what was read; weights and buffers were read in place."""
        values = state["optimizer"]
        for name, parameter, group in self._trained():
            piece = self._pieces.of[parameter]
            prefix = f"state.{name}."
            found = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            if found:
                self._optimizer.state[piece] = {
                    key: value.run.view(piece.shape) if isinstance(value, PartOfTensor) else value
                    for key, value in found.items()
                }
            for key in group:
                if f"param_groups.{name}.{key}" in values:
                    group[key] = values[f"param_groups.{name}.{key}"]

    def _model(self) -> dict[str, Any]:
        state = self._module.state_dict(keep_vars=True)
        return {
            name: self._weights[value] if value in self._weights else _plain(value) for name, value in state.items()
        }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Name, parameter and group of every parameter in the optimizer."""
        groups = {piece: group for group in self._optimizer.param_groups for piece in group["params"]}
        for _, slot in self._pieces.slots():
            group = groups.get(self._pieces.of[slot.parameter])
            if group is not None:
                yield slot.name, slot.parameter, group

    def _part(self, value: torch.Tensor, parameter: nn.Parameter) -> PartOfTensor:
        return PartOfTensor(value.reshape(-1), parameter.shape, self._starts[parameter])

    def _saved_states(self, metadata: Metadata, name: str) -> Iterator[tuple[str, Any]]:
        prefix = f"optimizer.state.{name}."
        for full, saved in metadata.state_dict_metadata.items():
            if full.startswith(prefix):
                yield full.removeprefix(prefix), saved

    def _room(self, key: str, saved: Any, parameter: nn.Parameter) -> Any:
        """Where a saved state is read to."""
        if not isinstance(saved, TensorStorageMetadata):
            return None
        piece, dtype = self._pieces.of[parameter], saved.properties.dtype
        if saved.size == parameter.shape and key not in SCALARS:
            return self._part(torch.empty(piece.shape, dtype=dtype, device=piece.device), parameter)
        return torch.empty(saved.size, dtype=dtype, device="cpu" if key in SCALARS else piece.device)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
