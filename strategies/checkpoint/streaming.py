"""Weights that stream: every rank reads its own parts of a model from safetensors files, and no rank ever has it whole.

`prepare_weights` finds the files and leaves stand-ins in the model (`strategies.parallel.empty`); splitting, adapters
and the strategy then work on shapes. `Weights.read_into` reads what the engine has of each parameter, in place, as a
checkpoint is loaded: a few rows at a time, in the dtype that the engine keeps it in. Weights that are stored in 4 bits
are read whole one after the other, and of the codes a rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from hardware_db.notices import notice
from strategies.checkpoint.content import SavedTensor
from strategies.checkpoint.object_store import location
from strategies.checkpoint.parts import ALL, LoadPlanner, pieces_of
from strategies.checkpoint.safefile import DTYPES
from strategies.checkpoint.states import MODEL, States, unwrapped
from strategies.checkpoint.storage import BoxFile, Reader, carried_out
from strategies.checkpoint.weights import WeightFiles, fit_to, open_weights, without_adapters
from strategies.distributed.consensus import everywhere, on_rank_zero
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun
from strategies.parallel.blocks import QUANTISER, quantised_weights, repeated_blocks
from strategies.parallel.empty import give_memory, leave_empty, weights_are_read


def prepare_weights(model: nn.Module, path: str | Path | None, environment: Environment) -> Weights | None:
    """Find the weights that a model is to have, and take those on the meta device out of it; None where it has its own.

    Heads that the files do not have get the values that their modules draw, those of rank 0.

    Raises:
        BrokenFile: there are no weights, or they are not this model's.
        CannotRun: the model has weights on the meta device, and no files are named.
    """
    if not path:
        empty = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
        if empty is not None:
            raise CannotRun(
                f"{empty} is on the meta device and has no values; say where they are by initialize(weights=DIRECTORY)"
                ' or "weights" in the config'
            )
        return None
    files = on_rank_zero(lambda: open_weights(location(path)))
    drawn = _new_heads(model, files)
    required = leave_empty(model) - drawn.keys()
    fitted = everywhere(lambda: fit_to(files, model, required))
    for module in dict.fromkeys(drawn.values()):
        _draw(model, module)
    if drawn and environment.is_main:
        more = f" and {len(drawn) - 1} more" if len(drawn) > 1 else ""
        notice(f"{files.path} has no {next(iter(drawn))}{more}: a new head starts from random values")
    return Weights(fitted)


def _new_heads(model: nn.Module, files: WeightFiles) -> dict[str, nn.Module]:
    """Return modules beside the blocks that the files have nothing of, by the names of their weights."""
    inside = {module for block in repeated_blocks(model) for module in block.modules()}
    have = fit_to(files, model, ()).index
    heads: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        own = {f"{path}.{name}" if path else name: weight for name, weight in module.named_parameters(recurse=False)}
        can_draw = hasattr(module, "reset_parameters") and module not in inside
        if own and can_draw and all(weight.is_meta and name not in have for name, weight in own.items()):
            heads.update(dict.fromkeys(own, module))
    return heads


def _draw(model: Any, module: Any) -> None:
    give_memory(module.parameters(recurse=False), torch.device("cpu"))
    with torch.no_grad():
        module.reset_parameters()
        draw = getattr(model, "_init_weights", None)  # transformers draws heads from its config's range
        if draw is not None:
            draw(module)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Codes:
    """A layer's weight that is stored in 4 bits, and what this rank has of its codes."""

    name: str
    layer: Any
    part: Any


class Weights:
    """The weights that a model is to have, by the names that it has without adapters."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    def read_into(self, states: States) -> int:
        """Read an engine's parts of all weights that the files have; every rank calls it. Return the bytes of its own.

        Raises:
            BrokenFile: a file is damaged.
        """
        model = states.module
        layers = {unwrapped(name): name for name in quantised_weights(model)}
        target: dict[str, Any] = {}
        index: dict[str, SavedTensor] = {}
        codes: list[_Codes] = []
        for key, part in states.weights().items():
            name = key.removeprefix(MODEL)
            saved = self._files.index.get(without_adapters(name))
            if name in layers:
                layer = model.get_submodule(layers[name].rpartition(".")[0])
                if saved is not None and hasattr(layer, QUANTISER):
                    codes.append(_Codes(name=without_adapters(name), layer=layer, part=part))
            elif saved is not None:
                target[key], index[key] = part, saved
        reader = Reader(self._files.folder, index, self._files.place_of)
        plan = LoadPlanner()
        carried_out(self._files.path, lambda: read_tensors({ALL: target}, storage_reader=reader, planner=plan))
        everywhere(lambda: self._store_in_4_bits(codes))
        states.updated()
        weights_are_read(model)
        return sum(map(_bytes_of, (*target.values(), *(code.part for code in codes))))

    def _store_in_4_bits(self, codes: Sequence[_Codes]) -> None:
        """Read weights one after the other, quantise each, and keep this rank's part of the codes."""
        for code in codes:
            quantised = getattr(code.layer, QUANTISER)(self._whole(self._files.index[code.name]))
            for values, box in pieces_of(code.part):
                values.copy_(quantised.data[box])
            code.layer.quant_state = quantised.quant_state
            if hasattr(code.layer.weight, "quant_state"):  # FSDP2 puts plain parameters in the place of bitsandbytes'
                code.layer.weight.quant_state = quantised.quant_state

    def _whole(self, saved: SavedTensor) -> torch.Tensor:
        whole = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        for box in saved.boxes:
            with BoxFile.open(*self._files.place_of(box.file)) as file:
                spans = zip(box.offsets, box.sizes, strict=True)
                target = whole[tuple(slice(low, low + long) for low, long in spans)]
                file.read(box.key, (0,) * len(box.sizes), target)
        return whole


def _bytes_of(part: Any) -> int:
    return sum(values.numel() * values.element_size() for values, _ in pieces_of(part))
