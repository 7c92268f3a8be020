"""Split a model between the ranks of a mesh: stages, layers, experts and sequences, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from planner.types.plan import Configuration
from strategies.errors import CannotRun
from strategies.parallel.empty import has_stand_ins, is_stand_in
from strategies.parallel.layers import LayerSplit, SharedLayer
from strategies.parallel.mesh import Group, Mesh
from strategies.parallel.ranks import ImaginedGroup
from strategies.parallel.split import ModelParts, note_parts, splits_in

_SPLITS: dict[Group, str] = {
    "pp": "strategies.parallel.stages:cut_stages",
    "tp": "strategies.parallel.tensor:split_layers",
    "ep": "strategies.parallel.expert:split_experts",
    "cp": "strategies.parallel.context:split_sequences",
}


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a model is called with: by place and by name."""
Partition = Literal["uniform", "parameters", "seconds"]
"""What pipeline stages have as equally as can be: blocks, parameters, or the time that their products take."""

CALL_TRAIN_BATCH = "this model is cut into pipeline stages; call engine.train_batch(batch), or engine.eval_batch(batch)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitOptions:
    """Options of splitting a model."""

    configuration: Configuration
    """The plan's: degrees, schedule, whether tp ranks split the sequence."""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """The script's styles by pattern of module names ("blocks.*.up": "colwise"); without any, the model's own plan, or
    one that is found by rule."""
    examples: Sequence[Arguments] = ()
    """What the model may be called with, the likeliest first: a pipeline looks at a forward pass."""
    partition: Partition = "uniform"
    """How a pipeline is cut."""


def share_weights(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights of rank 0; one tensor at a time, so that no device holds them all.

    Parts of layers that the script itself has split stay each rank's own, and what has no memory stays so.
    """
    parts = {id(model.get_parameter(name)) for name in splits_in(model)}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in parts or is_stand_in(tensor):
            continue
        here = tensor.detach().to(device)
        dist.broadcast(here, 0)
        if here.device != tensor.device:
            tensor.data.copy_(here)


Splitter = Callable[[nn.Module, Mesh, SplitOptions, ModelParts], None]


def split_model(model: nn.Module, mesh: Mesh, options: SplitOptions) -> ModelParts:
    """Leave this rank's part of a model in place, and note what it is of the whole (`parts_of`).

    It is called on every rank with the whole model, whose weights are rank 0's.

    Raises:
        CannotRun: the model cannot be split so; the line names what stands against it.
    """
    _require_tp_ranks(model, mesh)
    parts = ModelParts(tp=(mesh.rank("tp"), mesh.size("tp")))
    if not mesh.is_data_parallel or (has_stand_ins(model) and mesh.environment.world_size > 1):
        share_weights(model, mesh.environment.device)
    _split(model, mesh, options, parts)
    if not parts.is_whole:
        note_parts(model, parts)
    return parts


def _require_tp_ranks(model: nn.Module, mesh: Mesh) -> None:
    """Check that the script's own layers are whole, or split over the ranks that read the same samples.

    Raises:
        CannotRun: a layer is split over others.
    """
    tp = mesh.size("tp")
    for name, module in model.named_modules():
        if not isinstance(module, (SharedLayer, LayerSplit)) or module.ranks.size == 1:
            continue
        if module.ranks.size != tp:
            alike = f"tp {module.ranks.size}, or " if not mesh.environment.world_size % module.ranks.size else ""
            raise CannotRun(
                f"{name} is split over {module.ranks.size} ranks and the plan has tp {tp}; use {alike}make the layer"
                " before init_distributed, so that initialize splits it over the tp ranks of the plan"
            )
        own = dist.get_process_group_ranks(module.ranks.group)
        if own != mesh.ranks("tp"):
            planned = _listed(mesh.ranks("tp"))
            raise CannotRun(
                f"{name} is split over ranks {_listed(own)} and the plan's tp ranks are {planned}, who read the same"
                " samples; give the layer their group, or make it before init_distributed"
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _split(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    for degree, splitter in _SPLITS.items():
        if mesh.size(degree) > 1:
            module, _, name = splitter.partition(":")
            split: Splitter = getattr(import_module(module), name)
            split(model, mesh, options, parts)


# One rank alone, in a trace.


class _ImaginedMesh(Mesh):
    """The mesh of a plan of whose ranks only the first is there."""

    uneven = 1.0

    def _make_group(self, name: Group) -> dist.ProcessGroup:
        imagined: Any = ImaginedGroup(size=self.size(name), uneven=self.uneven)
        group: dist.ProcessGroup = imagined
        return group


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRank:
    """Rank 0 of a job on one node, of whose ranks no other is there."""

    world_size: int
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def local_world_size(self) -> int:
        """All ranks, on one node."""
        return self.world_size


def split_imagined(model: nn.Module, tp: int, cp: int, ep: int, splits_sequences: bool, *, uneven: float = 1.0) -> None:
    """Leave the first rank's part of a model of fake tensors, with no other rank there.

    What a rule finds is split as it runs, without the values that prove it right. `uneven` is by how much more tokens
    than the mean come to the experts of the rank.

    Raises:
        CannotRun: as `split_model`.
    """
    chosen = Configuration(
        strategy="fsdp",
        backend="torch",
        dp_shard=ep,
        tp=tp,
        cp=cp,
        ep=ep,
        sequence_parallel=splits_sequences,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        global_batch_size=ep,
        sequence_length=1,
        precision="fp32",
        optimizer="adamw",
    )
    mesh, parts = _ImaginedMesh(chosen.dims, FirstRank(world_size=ep * tp * cp)), ModelParts(tp=(0, tp))
    mesh.uneven = uneven
    _split(model, mesh, SplitOptions(configuration=chosen), parts)
