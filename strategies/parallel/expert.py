"""Expert parallelism: each rank has some of a mixture's routed experts, and is sent the tokens that chose them.

Tokens go to their experts' ranks and come back in two all-to-alls, as in GShard (arXiv:2006.16668, section 3); what
every token has (attention, router, shared experts) stays where it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strategies.errors import CannotRun
from strategies.parallel.context import scale_gradient
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import SplitOptions
from strategies.parallel.ranks import ImaginedGroup, TensorRanks, with_gradient
from strategies.parallel.split import ModelParts, even_split, hold_part, note_split

_WEIGHTS = ("gate_up_proj", "down_proj")
"""Of transformers' routed experts, each [experts, outputs, inputs]; biases are [experts, outputs]."""
_TAKEN = 3
"""What their forward pass takes: hidden states, chosen experts, weights."""


def split_experts(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    """Leave a rank its experts of every mixture, whose forward pass then exchanges tokens.

    Mixtures are modules with `num_experts`, `gate_up_proj` and `down_proj`, whose forward pass takes hidden states,
    [tokens, width], the chosen experts and their weights, both [tokens, chosen]: those of transformers.

    Raises:
        CannotRun: there is none, or its experts do not divide.
    """
    mixtures = {name: module for name, module in model.named_modules() if is_mixture(module)}
    ranks, exchange = mesh.size("ep"), TensorRanks(mesh.group("ep"))
    if not mixtures:
        raise CannotRun(
            f"ep {ranks} spreads routed experts, and {type(model).__name__} has none in the form of transformers'"
            " (num_experts, gate_up_proj, down_proj); use ep 1"
        )
    # DDP and FSDP2 average experts' gradients over the ranks that have the same ones, and those of the others over all;
    # ZeRO divides all by the same number.
    share = 1.0 if options.configuration.zero_stage else mesh.size("expert_dp") / mesh.size("dp_cp")
    for name, module in mixtures.items():
        experts: Any = module
        if experts.num_experts % ranks:
            raise CannotRun(
                f"ep {ranks} does not divide the {experts.num_experts} experts of {name}; use a degree that does"
            )
        for own, parameter in list(module.named_parameters(recurse=False)):
            split = even_split(parameter.shape, 0, rank=mesh.rank("ep"), ranks=ranks, over="ep")
            hold_part(parameter, split)
            note_split(module, own, split)
            parts.splits[f"{name}.{own}"] = split
            parts.experts.add(f"{name}.{own}")
        experts.num_experts //= ranks
        module.__dict__["forward"] = partial(_with_tokens_of_all, module, experts.forward, exchange, share)


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module is the routed experts of a mixture."""
    weights = [getattr(module, name, None) for name in _WEIGHTS]
    # Llama-4's take tokens that are sorted already, and no choice.
    return (
        hasattr(module, "num_experts")
        and all(isinstance(weight, nn.Parameter) for weight in weights)
        and len(inspect.signature(module.forward).parameters) >= _TAKEN
    )


def _with_tokens_of_all(
    experts: Any,
    forward: Any,
    ranks: TensorRanks,
    share: float,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what the chosen experts make of tokens, [tokens, width], weighted and summed."""
    if ranks.is_whole:
        whole: torch.Tensor = forward(hidden, chosen, weights)
        return whole
    numbers = chosen.reshape(-1)
    order = numbers.argsort(stable=True)
    counts, coming = _count_tokens(numbers, experts.num_experts, ranks)
    if isinstance(ranks.group, ImaginedGroup):
        each = numbers.numel() // ranks.size
        sent, received = [each] * ranks.size, [round(ranks.group.uneven * each)] * ranks.size
    else:
        sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
    tokens = exchanged(hidden[order // chosen.shape[-1]], ranks, sent, received)
    local = torch.arange(experts.num_experts, device=hidden.device).repeat(ranks.size)
    own = local.repeat_interleave(coming.reshape(-1), output_size=sum(received)).unsqueeze(-1)
    outputs = scale_gradient(_run_experts(forward, scale_gradient(tokens, 1 / share), own), share)
    back = exchanged(outputs, ranks, received, sent)
    of_token = back[order.argsort()].view(*chosen.shape, -1)
    return (of_token * weights.unsqueeze(-1).to(of_token.dtype)).sum(1)


def _count_tokens(numbers: torch.Tensor, experts: int, ranks: TensorRanks) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the tokens that this rank sends to each expert, and gets from each rank for each: [ranks, experts]."""
    if isinstance(ranks.group, ImaginedGroup):
        return numbers.new_empty((ranks.size, experts)), numbers.new_empty((ranks.size, experts))
    counts = torch.bincount(numbers, minlength=experts * ranks.size).view(ranks.size, -1)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=ranks.group)
    return counts, coming


def _run_experts(forward: Any, tokens: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Run each token through its expert; with no token too, since all ranks gather the experts' weights."""
    if tokens.shape[0]:
        outputs: torch.Tensor = forward(tokens, own, torch.ones_like(own, dtype=tokens.dtype))
        return outputs
    row = tokens.sum(0, keepdim=True)
    nothing: torch.Tensor = forward(
        row, own.new_zeros(1, 1), torch.ones(1, 1, dtype=tokens.dtype, device=tokens.device)
    )
    return nothing[:0]


def exchanged(rows: torch.Tensor, ranks: TensorRanks, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Exchange rows, an all-to-all: `sent` of them go to each rank, `received` come from each, by rank."""
    out, back = list(sent), list(received)
    return with_gradient(
        rows, lambda values: _all_to_all(values, ranks, out, back), lambda g: _all_to_all(g, ranks, back, out)
    )


def _all_to_all(rows: torch.Tensor, ranks: TensorRanks, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
    if not isinstance(ranks.group, ImaginedGroup):
        dist.all_to_all_single(arrived, rows, received, sent, group=ranks.group)
    return arrived
