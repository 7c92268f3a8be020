"""Rank 0's part of a model that ranks split among them, over fake ranks.

Layers are split as `dsplan.initialize` splits them, and so are the tokens of a module of the user's own. Expert
parallelism is transformers' (`transformers.distributed`), which spreads experts by the plan in a model's config.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.cost.split import why_other_layers
from planner.types.plan import Configuration
from strategies.errors import CannotRun
from strategies.parallel.blocks import without_adapters
from strategies.parallel.context import split_sequences
from strategies.parallel.mesh import Group, Mesh
from strategies.parallel.model import FirstRank, SplitOptions, Splitter
from strategies.parallel.split import ModelParts, note_parts, parts_of
from strategies.parallel.tensor import split_layers
from strategies.parallel.whole import Kind, kinds_of
from strategies.torch_compat.dispatch import without_modes
from strategies.tracing.step.refusal import TraceFailed


def split_weights(module: nn.Module, configuration: Configuration) -> None:
    """Leave rank 0's part of every weight that tensor parallelism splits, as `dsplan.initialize` splits it.

    Raises:
        TraceFailed: nothing says how, or widths do not divide.
    """
    _split(module, configuration, "tp", split_layers)


def split_tokens(module: nn.Module, configuration: Configuration) -> None:
    """Have a module of the user's own compute with rank 0's tokens of every sample, as `dsplan.initialize` does.

    Raises:
        TraceFailed: its blocks are not such as can be split so.
    """
    _split(module, configuration, "cp", split_sequences)


def _split(module: nn.Module, configuration: Configuration, degree: Group, split: Splitter) -> None:
    mesh = _mesh(configuration)
    parts = ModelParts(tp=(mesh.rank("tp"), mesh.size("tp")))
    with without_modes():  # torch looks for this rank in a tensor of rank numbers
        mesh.group(degree)
    try:
        split(module, mesh, SplitOptions(configuration=configuration), parts)
    except CannotRun as problem:
        raise TraceFailed("", "", str(problem)) from problem
    if not parts.is_whole:
        note_parts(module, parts)


def _mesh(configuration: Configuration) -> Mesh:
    return Mesh.of(configuration, FirstRank(world_size=configuration.world_size))


def kinds_in(module: nn.Module, configuration: Configuration) -> Mapping[nn.Parameter, Kind]:
    """Return what our own ZeRO's buckets have in common where tensor parallelism split the module, else nothing."""
    if configuration.tp == 1:
        return {}
    return kinds_of(module.named_parameters(), parts_of(module), _mesh(configuration))


# Pipelines: what one rank holds, and for how many micro-batches.


def enough_micro_batches(configuration: Configuration) -> int:
    """So many micro-batches that a rank reaches its largest moment."""
    micro_batches, pp = configuration.gradient_accumulation_steps, configuration.pp
    if configuration.pp_schedule == "gpipe":
        return micro_batches
    return min(micro_batches, 2 * pp if configuration.virtual_stages > 1 else pp + 2)


class Chunk(nn.Module):
    """Consecutive blocks of a causal language model, with the token table if they come first, head and loss if last.

    It is given token ids or the states that the chunk before it made.
    """

    def __init__(self, model: Any, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        base = getattr(model, model.base_model_prefix)
        base.layers = nn.ModuleList(base.layers[index] for index in blocks)
        if not is_first:
            base.embed_tokens = None
        if not is_last:
            base.norm = nn.Identity()
            model.lm_head = None
        self.model, self.is_first, self.is_last = model, is_first, is_last

    def forward(self, given: torch.Tensor, labels: torch.Tensor, **others: Any) -> torch.Tensor:
        """Return the hidden states, or the last chunk's loss."""
        model: Any = self.model
        arguments = {"input_ids" if self.is_first else "inputs_embeds": given, **others}
        if self.is_last:
            loss: torch.Tensor = model(**arguments, labels=labels).loss
            return loss
        states: torch.Tensor = getattr(model, model.base_model_prefix)(**arguments).last_hidden_state
        return states


def chunks_of(module: nn.Module, configuration: Configuration, rank: int) -> list[Chunk]:
    """Return a pipeline rank's chunks, of the blocks that the plan names.

    Without any they are as equal as the number of blocks allows; the first ones have one block more.

    Raises:
        TraceFailed: the model's blocks are not in `layers` of its base model, there are fewer than chunks, or the plan
            names others.
    """
    model = without_adapters(module)
    layers = getattr(getattr(model, getattr(model, "base_model_prefix", "") or "model", None), "layers", None)
    stages = configuration.pp * configuration.virtual_stages
    if layers is None or len(layers) < stages:
        raise TraceFailed("", "", f"a pipeline of {stages} stages is traced for decoders with as many blocks or more")
    if problem := why_other_layers(configuration.stage_layers, len(layers), type(model).__name__):
        raise TraceFailed("", "", problem)
    each, more = divmod(len(layers), stages)
    counts = configuration.stage_layers or [each + (index < more) for index in range(stages)]
    ends = list(accumulate(counts, initial=0))
    chunks = []
    for stage in range(rank, stages, configuration.pp):
        blocks = range(ends[stage], ends[stage + 1])
        is_last = stage == stages - 1
        chunks.append(Chunk(copy.deepcopy(model), blocks, is_first=stage == 0, is_last=is_last))
    return chunks


# Expert parallelism: every rank has some experts whole, and is sent the tokens that chose them.


def split_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave rank 0's experts, as transformers' plan for them has it, each rank sent as many tokens as it sends.

    Raises:
        TraceFailed: the model has no plan for its experts.
    """
    model = without_adapters(module)
    plan = getattr(model, "ep_plan", None)
    if not plan:
        raise TraceFailed("", "", f"transformers has no expert-parallel plan for {type(model).__name__}")
    parallel: Any = import_module("transformers.distributed.expert_parallel")
    parallel.EPImplementationInterface.register(_BALANCED, _balanced(parallel))
    parallel.apply_expert_parallelism(model, mesh["ep"], mesh["alone"], model._expand_parallel_plan(plan), _BALANCED)


_BALANCED = "balanced_all_to_all"


def _balanced(parallel: Any) -> Any:
    kind: Any = parallel.AllToAllEP

    class BalancedAllToAll(kind):  # type: ignore[misc]
        """Transformers' exchange of tokens, with the sizes known that it reads back from the device."""

        def _dispatch_tokens(self, states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
            group, ranks = self.ep_mesh.get_group(), self.ep_mesh.size()
            chosen = top_k_index.size(-1)
            expert_ids = top_k_index.reshape(-1)
            order = torch.argsort(expert_ids)
            sent = states[order // chosen]
            each = expert_ids.numel() // ranks
            sizes = [each] * (ranks - 1) + [expert_ids.numel() - each * (ranks - 1)]
            collectives: Any = parallel
            received = collectives.all_to_all_single_autograd(sent, sizes, sizes, group)
            received = parallel._WaitTensor.apply(received)
            ids = torch.zeros(sum(sizes), 1, dtype=torch.long)
            weights = torch.ones_like(ids, dtype=received.dtype)
            state = parallel._AllToAllState(top_k_weights, order, sizes, sizes, states.size(0))
            return received, ids, weights, state

    return BalancedAllToAll
