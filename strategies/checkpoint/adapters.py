"""Adapters in checkpoints and exports: what PEFT calls them, how they are merged, and which base they lie over.

A checkpoint may leave out frozen weights (`checkpoint.trainable_only`). It then says what they were by a sum of their
bits as bf16, which is the same however they are sharded, and whether they are kept in fp32 or bf16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.states import States
from strategies.distributed.environment import Environment
from strategies.errors import BrokenFile, CannotRun
from strategies.parallel.blocks import quantised_weights
from strategies.parallel.mesh import Mesh
from strategies.parallel.whole import gathered

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
"""PEFT's names."""
_PREFIX = "base_model.model."
"""What `PeftModel` puts in front of every name of the model that it holds."""
_BY_NAME = ("names", "merges")
"""What of an adapter is of single layers."""


def adapter_of(module: nn.Module, names: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, Any]:
    """Return what an export needs to know of a model's adapters, as JSON; empty without adapters.

    That is PEFT's config of them, its names for them, and how each is merged. `names` are the module's tensors by the
    names of checkpoints. Of a pipeline those of all stages are in it; every rank calls it together.
    """
    stages = [stage for stage in gathered(_own_adapter(module, names), mesh, ("pp",)) if stage]
    if not stages:
        return {}
    joined = {word: {name: value for stage in stages for name, value in stage[word].items()} for word in _BY_NAME}
    return {**stages[0], **joined}


def _own_adapter(module: nn.Module, names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return {}
    active = getattr(module, "active_adapter", None)
    adapter = active if isinstance(active, str) and active in configs else next(iter(configs))
    by_tensor = {id(tensor): name for name, tensor in names.items()}
    peft = import_module("peft")
    state = peft.get_peft_model_state_dict(
        module, state_dict=dict(names), adapter_name=adapter, save_embedding_layers=False
    )
    config = configs[adapter].to_dict()
    config["inference_mode"] = True
    return {
        "config": json.loads(json.dumps(config, default=_plain)),
        "names": {
            by_tensor[id(tensor)]: f"{_PREFIX}{name.removeprefix(_PREFIX)}"
            for name, tensor in state.items()
            if id(tensor) in by_tensor
        },
        "merges": {f"{path}.base_layer.weight": merge for path, merge in _merges(module, adapter, names)},
        "adapter": adapter,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A weight of an export: its own name in the checkpoint, and the merge that makes it, if any."""

    own: str
    merge: Mapping[str, Any] | None = None


def adapters_alone(adapter: Mapping[str, Any]) -> dict[str, Written]:
    """Return the weights of `adapter_model.safetensors`, by PEFT's names."""
    return {name: Written(own=own) for own, name in adapter["names"].items()}


def merged_names(adapter: Mapping[str, Any], names: Mapping[str, object]) -> dict[str, Written]:
    """Return the whole model's weights by the names that they have without adapters.

    Raises:
        CannotRun: an adapter is of a kind that is not merged here.
    """
    merges, kept = adapter["merges"], f".modules_to_save.{adapter['adapter']}."
    written: dict[str, Written] = {}
    for own in names:
        if ".lora_" in own or ".original_module." in own or (".modules_to_save." in own and kept not in own):
            continue
        merge = merges.get(own)
        if merge is not None and merge["problem"]:
            raise CannotRun(f"export: {own} cannot be merged ({merge['problem']}); export the adapters (merged=False)")
        name = own.removeprefix(_PREFIX).replace(kept, ".").replace(".base_layer.", ".")
        written[name] = Written(own=own, merge=merge)
    return written


def merge_into(
    whole: torch.Tensor, merge: Mapping[str, Any], down: torch.Tensor, up: torch.Tensor, magnitude: torch.Tensor | None
) -> torch.Tensor:
    """Return W + s B A, in fp32 and rounded once.

    With a magnitude m it is (m / ||W + s B A||) (W + s B A) over rows (DoRA, Liu et al. 2024, arXiv:2402.09353,
    equation 5).

    Args:
        whole: the frozen matrix, [out, in], or [in, out] where the merge says `transposed`.
        merge: s as `scale`, and `transposed`.
        down: [rank, in].
        up: [out, rank].
        magnitude: [out].
    """
    wide = whole.float().t() if merge["transposed"] else whole.float()
    wide = wide + float(merge["scale"]) * (up.float() @ down.float())
    if magnitude is not None:
        wide = (magnitude.float() / wide.norm(dim=1)).unsqueeze(1) * wide
    return (wide.t() if merge["transposed"] else wide).to(whole.dtype).contiguous()


def _merges(module: nn.Module, adapter: str, names: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, part in module.named_modules():
        layer: Any = part
        if not hasattr(layer, "base_layer") or adapter not in getattr(layer, "scaling", {}):
            continue
        down, up = (f"{path}.{side}.{adapter}.weight" for side in ("lora_A", "lora_B"))
        magnitude = f"{path}.lora_magnitude_vector.{adapter}.weight"
        problem = ""
        if down not in names or not isinstance(layer.lora_A[adapter], nn.Linear):
            problem = f"it is beside a {type(layer.base_layer).__name__}"
        elif f"{path}.lora_B.{adapter}.bias" in names:
            problem = "its adapter has a bias"
        elif type(layer.base_layer).__name__ == "Linear4bit":
            problem = "its weight is stored in 4 bits"
        tensors = {"down": down, "up": up, "magnitude": magnitude if magnitude in names else ""}
        transposed, scale = bool(getattr(layer, "fan_in_fan_out", False)), float(layer.scaling[adapter])
        yield path, {**tensors, "scale": scale, "transposed": transposed, "problem": problem}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))


def left_out(states: States, *, trainable_only: bool) -> frozenset[str]:
    """Return the names of what a checkpoint leaves out: frozen weights if asked, and in any case those in 4 bits.

    These only the library that made them can read.
    """
    narrow = quantised_weights(states.module)
    if not trainable_only and not narrow:
        return frozenset()
    own = tuple(f"{name}." for name in narrow)
    return frozenset(
        name
        for name, tensor in states.names.tensors.items()
        if name.startswith(own) or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    )


def describe_base(states: States, names: frozenset[str], environment: Environment) -> dict[str, Any]:
    """Return what the left-out weights are, as JSON; empty for none. Every rank calls it together."""
    if not names:
        return {}
    text, kinds, total = hashlib.sha256(), set(), 0
    # Scales of 4-bit weights are among the names where no strategy has put a tensor of its own in a weight's place.
    weights = {name for name in names if isinstance(states.names.tensors[name], nn.Parameter)}
    for name in sorted(weights):
        tensor = states.names.tensors[name]
        text.update(f"{name} {list(states.shape_of(tensor))}\n".encode())
        own = _own_part(states.weight(tensor), environment)
        kinds.add(str(tensor.dtype).removeprefix("torch."))
        if own is not None:
            total += _sum_of_bits(own)
    parts = states.parts
    if not parts.is_whole:
        # Stages and ranks with experts of their own have other names: `Restore` looks for each one by itself.
        has_all_names = parts.blocks is None and not parts.experts
        return {"names": text.hexdigest() if has_all_names else "", "weights": len(names), "dtypes": [], "bits": 0}
    bits = _sum_up(total, environment)
    return {"names": text.hexdigest(), "weights": len(weights), "dtypes": sorted(kinds), "bits": bits}


def require_same_base(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise `BrokenFile` for frozen weights that are others than those that the checkpoint was trained beside."""
    if saved.get("names") and here.get("names") and saved["names"] != here["names"]:
        problem = f"leaves out {saved.get('weights')} frozen weights, and this model has others"
        raise BrokenFile(path, problem, "build the model that was saved, frozen alike")
    comparable = all(_is_comparable(side.get("dtypes")) for side in (saved, here))
    if comparable and saved.get("bits") != here.get("bits"):
        problem = "was trained beside other frozen weights than this model's"
        raise BrokenFile(path, problem, "load the base model that it was trained on")


def _is_comparable(dtypes: Any) -> bool:
    """Return whether weights are the same once they are rounded to bf16, whichever strategy keeps them."""
    return bool(dtypes) and set(dtypes) <= {"float32", "bfloat16"}


def _own_part(value: Any, environment: Environment) -> torch.Tensor | None:
    """Return the elements of a tensor that this rank counts, so that all ranks together count each once."""
    if isinstance(value, PartOfTensor):
        return value.tensor
    if isinstance(value, DTensor):
        coordinate = value.device_mesh.get_coordinate() or ()
        first = (
            at == 0 for at, placement in zip(coordinate, value.placements, strict=True) if placement.is_replicate()
        )
        return value.to_local().detach() if all(first) else None
    whole: torch.Tensor | None = value.detach() if environment.is_main else None
    return whole


_MODULUS = 2**61 - 1


def _sum_of_bits(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point():
        return int(tensor.to(torch.int64).sum().item())
    total = 0
    for part in torch.split(tensor.reshape(-1), 1 << 24):  # a copy of a large table would be felt
        total += int(part.to(torch.bfloat16).view(torch.int16).to(torch.int64).sum().item())
    return total


def _sum_up(total: int, environment: Environment) -> int:
    if environment.world_size == 1:
        return total % _MODULUS
    everywhere = torch.tensor(total, dtype=torch.int64, device=environment.device)
    dist.all_reduce(everywhere)
    return int(everywhere.item()) % _MODULUS
