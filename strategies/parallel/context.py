"""Context parallelism: each rank has some of every sample's tokens; causal attention sees the keys and values of all.

A sequence is cut into two chunks per rank, and rank r has chunks r and 2 cp - 1 - r, so that causal attention takes all
ranks equally long (as in torch's `context_parallel` and Megatron-LM). Keys and values are all-gathered, and each chunk
of queries attends to those that come before it: on a GPU no mask is made.

A causal language model of transformers is split at its input: ids, positions and shifted labels. Any other model is
split at its first block and made whole after the last, so that what is outside the blocks sees whole sequences.

A router's auxiliary loss is that of each rank's own tokens, as it is of each rank's own samples.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.errors import CannotRun
from strategies.parallel.blocks import repeated_blocks, without_adapters
from strategies.parallel.layers import Columns
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import SplitOptions
from strategies.parallel.ranks import (
    SEQUENCE,
    TensorRanks,
    gather_from_ranks,
    split_between_ranks,
    tokens_of_each,
    with_gradient,
)
from strategies.parallel.split import ModelParts
from strategies.parallel.stages import stages_of
from strategies.parallel.styles import Randomness, derived, draw_own, is_linear, region_end, widths
from strategies.torch_compat.autograd import has_saved_tensor_hooks
from strategies.torch_compat.dispatch import FakeTensor, without_modes
from strategies.torch_compat.tensors import storage_number

_log = logging.getLogger(__name__)

_IGNORED = -100
"""Labels that no loss is made of, torch's `ignore_index`."""
_OTHER_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
"""Modules that mix tokens which are neighbours, on whatever rank these are."""


def split_sequences(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    """Have a model compute with this rank's tokens of every sample that it is given whole.

    Raises:
        CannotRun: it has no blocks, or its attention is no causal attention over all earlier tokens.
    """
    inner = without_adapters(model)
    ranks = TensorRanks(mesh.group("cp"))
    blocks = repeated_blocks(inner)
    _require_attention_alone(inner, blocks, ranks.size)
    randomness = Randomness(ranks)
    for block in blocks:
        _attend_to_all(block, ranks)
    taken, stages = inspect.signature(inner.forward).parameters, stages_of(model)
    if {"position_ids", "labels"} <= taken.keys() and hasattr(inner, "loss_function"):
        draw_own(inner, randomness)
        if stages is not None:
            stages.requirements.append(lambda arguments: _require_plain(inner, _named(inner, *arguments)))
        inner.register_forward_pre_hook(partial(_own_inputs, ranks, stages is not None), with_kwargs=True)
        inner.register_forward_hook(partial(_whole_loss, ranks), with_kwargs=True)
        return
    _require_no_positions(blocks, ranks, mesh, options)
    for block in blocks:
        draw_own(block, randomness)
    is_first, is_last = stages is None or stages.has_first, stages is None or stages.has_last
    # Before tp ranks split what is left, and after they have made it whole.
    enters = partial(_own_tokens if is_first else _of_own_tokens, ranks)
    blocks[0].register_forward_pre_hook(enters, prepend=True, with_kwargs=True)
    if is_last:
        blocks[-1].register_forward_hook(partial(_all_tokens, ranks))


# What can be split.


def _require_attention_alone(model: Any, blocks: Sequence[nn.Module], ranks: int) -> None:
    """Check that attention alone mixes the tokens of a model."""
    kind = type(model).__name__
    if not blocks:
        raise CannotRun(f"cp {ranks} splits what blocks compute, and {kind} has none; use cp 1")
    modules = [module for block in blocks for module in block.modules()]
    mixers = {type(module).__name__ for module in modules if isinstance(module, _OTHER_MIXERS)}
    if mixers or getattr(model, "_is_stateful", False):
        raise CannotRun(
            f"cp {ranks} splits sequences that attention alone mixes, and blocks of {kind} have"
            f" {' and '.join(sorted(mixers)) or 'a recurrent state'} too; use cp 1"
        )
    loss = getattr(getattr(model, "loss_function", None), "__name__", "CausalLM")
    if hasattr(model, "loss_function") and "CausalLM" not in loss:
        raise CannotRun(f"cp {ranks} splits the loss of the next token, and that of {kind} is {loss}; use cp 1")


def _require_no_positions(blocks: Sequence[nn.Module], ranks: TensorRanks, mesh: Mesh, options: SplitOptions) -> None:
    """Check on a copy of the first block that it makes of parts of a sequence what it makes of all.

    Blocks that make positions of their own would count each rank's tokens from 0.

    Raises:
        CannotRun: it does not.
    """
    block, device = blocks[0], mesh.environment.device
    # What tp ranks have split is given whole rows too, but for what their row-parallel layers take.
    inputs = [widths(module)[0] for module in block.modules() if is_linear(module) or isinstance(module, Columns)]
    weights = list(block.parameters())
    if not inputs or any(isinstance(part, FakeTensor) or part.is_meta for part in weights):
        return
    if not all(part.is_floating_point() for part in weights):  # quantized ones have no random values
        return
    generator = torch.Generator().manual_seed(0)
    tried = copy.deepcopy(block).eval().to(device).float()
    for weight in tried.parameters():
        if weight.dim() > 1 or not weight.any():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 2 / weight.shape[-1] ** 0.5)
    if options.configuration.sequence_parallel and len(blocks) > 1:
        tried.register_forward_hook(region_end(TensorRanks(mesh.group("tp"))))
    hidden = torch.randn(1, 4 * ranks.size * mesh.size("tp"), inputs[0], generator=generator).to(device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        with ranks.open_layers():
            try:
                expected = _first(tried(hidden))
            except Exception:  # whatever a block raises that takes other arguments, which `_own_tokens` looks at
                _log.debug("%s does not run on hidden states alone", type(block).__name__, exc_info=True)
                return
        together = all_chunks(_first(tried(own_chunks(hidden, ranks))), ranks)
    if not torch.allclose(together, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise CannotRun(
            f"cp {ranks.size} splits sequences between blocks, and {type(block).__name__} makes something else of a"
            " part of a sequence than of the whole, as with positions that it counts itself; use cp 1"
        )


def _first(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


# Chunks of a sequence.


def own_chunks(whole: torch.Tensor, ranks: TensorRanks, dim: int = SEQUENCE) -> torch.Tensor:
    """Return the rank's two chunks of a tensor along its sequence; gradients are all-gathered.

    Raises:
        CannotRun: the sequence does not divide into two chunks per rank.
    """
    tokens_of_each(whole.shape[dim], ranks.size)
    chunks = whole.chunk(2 * ranks.size, dim=dim)
    pairs = [chunks[chunk] for rank in range(ranks.size) for chunk in _places(rank, ranks.size)]
    return split_between_ranks(torch.cat(pairs, dim=dim), ranks, dim)


def all_chunks(own: torch.Tensor, ranks: TensorRanks, dim: int = SEQUENCE, *, sums: bool = False) -> torch.Tensor:
    """Return the whole sequence, in its order, of the ranks' chunks; `sums`: gradients are reduce-scattered."""
    gathered = gather_from_ranks(own.contiguous(), ranks, dim, sums=sums).chunk(2 * ranks.size, dim=dim)
    order = [chunk for rank in range(ranks.size) for chunk in _places(rank, ranks.size)]
    return torch.cat([gathered[order.index(chunk)] for chunk in range(2 * ranks.size)], dim=dim)


def _places(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


# Attention.


class _AllKeys(TorchFunctionMode):
    """`scaled_dot_product_attention` of this rank's queries over the keys and values of all ranks, causal."""

    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__()
        self._ranks = ranks
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.calls += 1
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
        return _attention(self._ranks, **{**named, **(kwargs or {})})


def _attention(
    ranks: TensorRanks,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Heads before tokens: [samples, heads, tokens, width]. A mask, of this rank's tokens alone, must be causal."""
    if query.shape[-2] != key.shape[-2]:
        raise CannotRun("cp splits self-attention, and a block attends to other tokens than its own; use cp 1")
    if not is_causal and (attn_mask is None or not _is_causal(attn_mask)):
        raise CannotRun("cp splits causal attention, and a block's attention is none; use cp 1")
    keys, values = (all_chunks(tensor, ranks, -2, sums=True) for tensor in (key, value))
    length = query.shape[-2] // 2
    attended = []
    with _gather_again(ranks, (key, value), (keys, values)):
        for chunk, queries in zip(_places(ranks.rank, ranks.size), query.chunk(2, dim=-2), strict=True):
            end = (chunk + 1) * length
            bias = earlier_tokens(length, end, query.device)
            attended.append(
                functional.scaled_dot_product_attention(
                    queries, keys[..., :end, :], values[..., :end, :], attn_mask=bias, dropout_p=dropout_p, **options
                )
            )
    return torch.cat(attended, dim=-2)


def _gather_again(
    ranks: TensorRanks, own: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]
) -> AbstractContextManager[object]:
    """Have backward all-gather keys and values once more instead of keeping those of all ranks from forward.

    So does torch's `context_parallel`. Where activation checkpointing keeps what is saved, it is left to it.
    """
    if not torch.is_grad_enabled() or has_saved_tensor_hooks():
        return nullcontext()
    gathers = {storage_number(tensor): _Again(ranks, mine) for mine, tensor in zip(own, whole, strict=True)}

    def pack(tensor: torch.Tensor) -> Any:
        again = gathers.get(storage_number(tensor))
        return tensor if again is None else again.view_of(tensor)

    return saved_tensors_hooks(pack, lambda packed: packed() if isinstance(packed, partial) else packed)


class _Again:
    """Keys or values of all ranks, gathered at the first view that backward asks for and freed after the last."""

    def __init__(self, ranks: TensorRanks, own: torch.Tensor) -> None:
        self._ranks, self._own = ranks, own.detach()
        self._saved = self._given = 0
        self._whole: torch.Tensor | None = None

    def view_of(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what gives the same view of the tensor that will be gathered."""
        self._saved += 1
        return partial(self._view, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        if self._whole is None:
            with torch.no_grad():
                self._whole = all_chunks(self._own, self._ranks, -2)
        view, self._given = self._whole.as_strided(shape, strides, offset), self._given + 1
        if self._given == self._saved:
            self._whole, self._given = None, 0
        return view


def earlier_tokens(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Say which keys come before each of the last `queries` tokens; on a GPU so that flash attention needs no mask."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # with it comes torch's compiler

        with without_modes():  # selective checkpointing's cannot make a subclass of tensors
            return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _is_causal(mask: torch.Tensor) -> bool:
    """Return whether a mask lets tokens see themselves and all earlier ones, and adds nothing to their scores."""
    if mask.is_meta or isinstance(mask, FakeTensor):
        return True
    earlier = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((mask == earlier).all())
    return bool(((mask == 0) == earlier).all()) and bool((mask[..., ~earlier] < -1e4).all())


def _with_all_keys(forward: Any, block: str, ranks: TensorRanks, *args: Any, **kwargs: Any) -> Any:
    """Let a block attend to all tokens, whose keys and values are all-gathered."""
    if ranks.is_whole:
        return forward(*args, **kwargs)
    with _AllKeys(ranks) as attention:
        output = forward(*args, **kwargs)
    if not attention.calls:
        raise CannotRun(
            f"cp {ranks.size} splits torch's scaled_dot_product_attention, and {block} calls it nowhere; give the model"
            " attention sdpa, or use cp 1"
        )
    return output


class _Attending(nn.Module):
    """A block whose attention is over the tokens of all ranks."""

    cp_ranks: TensorRanks
    cp_block: str
    """The name of its own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _with_all_keys(super().forward, self.cp_block, self.cp_ranks, *args, **kwargs)


def _attend_to_all(block: Any, ranks: TensorRanks) -> None:
    """Have a block's attention see all tokens, in its forward pass and where that is run again.

    Transformers recomputes the forward pass of a block's class, and `Recomputation` what it was given.
    """
    forward, kind = vars(block).get("forward"), type(block).__name__
    if forward is None:
        block.__class__, block.cp_ranks, block.cp_block = derived(_Attending, type(block)), ranks, kind
    elif hasattr(forward, "recomputed"):
        forward.recomputed = partial(_with_all_keys, forward.recomputed, kind, ranks)
    else:
        vars(block)["forward"] = partial(_with_all_keys, forward, kind, ranks)


# A model that is split at its input.


def _named(model: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    given = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def _own_inputs(ranks: TensorRanks, is_required: bool, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Cut inputs to this rank's tokens, with positions and shifted labels; `is_required`: they were checked before."""
    if ranks.is_whole:
        return args, kwargs
    given = _named(model, args, kwargs)
    if not is_required:
        _require_plain(model, given)
    tokens = _tokens_of(given)
    samples, length = tokens.shape[:2]
    if given.get("position_ids") is None:
        given["position_ids"] = torch.arange(length, device=tokens.device).expand(samples, length)
    labels = given.get("labels")
    if labels is not None and given.get("shift_labels") is None:
        given["shift_labels"] = functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
    # Positions that jump would be read as samples that are packed, on the ranks where they do.
    given["attention_mask"] = torch.ones(samples, length, dtype=torch.long, device=tokens.device)
    for name in _OF_TOKENS:
        if isinstance(given.get(name), torch.Tensor):
            given[name] = own_chunks(given[name], ranks)
    return (), given


_OF_TOKENS = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "labels",
    "shift_labels",
    "token_type_ids",
)
"""What a causal language model takes for each token, [samples, length, ...]."""


def _tokens_of(given: Mapping[str, Any]) -> torch.Tensor:
    tokens: torch.Tensor = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    return tokens


def _require_plain(model: Any, given: Mapping[str, Any]) -> None:
    """Check that each token of the samples attends to all before it."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())):
        raise CannotRun(
            "cp splits samples without padding, and attention_mask has zeros, or is not [samples, tokens]; fill samples"
            " with further text, or use cp 1"
        )
    if positions is not None and not (positions.dim() == 2 and bool((positions.diff(dim=-1) == 1).all())):
        raise CannotRun(
            "cp splits samples that are one text each, and position_ids do not count on from token to token; use cp 1"
        )
    length = _tokens_of(given).shape[1]
    others = [name for name, value in given.items() if name not in _OF_TOKENS and _is_of_tokens(value, length)]
    if others or given.get("logits_to_keep") or given.get("return_dict") is False:
        name = (others or [name for name in ("logits_to_keep", "return_dict") if name in given])[0]
        raise CannotRun(f"cp knows no way to split {name}, which the model is given; leave it out, or use cp 1")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if not getattr(config, "use_sliding_window", True):
        windows = windows[1:]
    for window in windows:
        if isinstance(window, int) and window < length:
            raise CannotRun(
                f"cp splits attention over all earlier tokens, and that of {type(model).__name__} ends after {window};"
                " use cp 1"
            )


def _is_of_tokens(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and length in value.shape


def _whole_loss(ranks: TensorRanks, model: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Return the loss over the whole sequences.

    Logits are whole where the script makes its own loss of them and in evaluation; a training step that has its loss
    leaves them out.
    """
    if ranks.is_whole or isinstance(output, torch.Tensor):  # hidden states, which the next stage receives
        return output
    if isinstance(output, tuple):
        raise CannotRun(f"cp reads loss and logits of what {type(model).__name__} returns; leave return_dict as it is")
    loss, labels = getattr(output, "loss", None), kwargs.get("shift_labels")
    if loss is not None and labels is not None:
        counted = (labels != _IGNORED).sum()
        if kwargs.get("num_items_in_batch") is not None:
            share = torch.ones((), device=loss.device)
        else:
            total = counted.clone()
            dist.all_reduce(total, group=ranks.group)
            share = counted / total.clamp(min=1)
        # A rank without labels of its own has a mean over none.
        own = torch.where(counted > 0, loss, loss.nan_to_num() * 0)
        output.loss = _Whole.apply(own, share, ranks)  # type: ignore[no-untyped-call]
    if getattr(output, "logits", None) is not None:
        is_left_out = model.training and loss is not None
        output.logits = None if is_left_out else all_chunks(scale_gradient(output.logits, ranks.size), ranks)
    return output


class _Whole(Function):
    """The sum of the ranks' losses by their shares.

    Each rank's own gets as many times its share of the gradient as there are ranks, over which gradients of weights are
    averaged.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, share: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        ctx.factor = share * ranks.size
        total = loss * share
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None, None


# A model that is split at its first block.


def scale_gradient(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the same values; their gradient is multiplied by a factor."""
    return with_gradient(values, lambda v: v.view_as(v), lambda gradient: gradient * factor)


def _own_tokens(ranks: TensorRanks, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if ranks.is_whole:
        return args, kwargs
    if not args or not isinstance(args[0], torch.Tensor):
        raise CannotRun(
            f"cp splits the hidden states that {type(block).__name__} takes first, and it takes none; use cp 1"
        )
    own = own_chunks(scale_gradient(args[0], 1 / ranks.size), ranks)
    return _of_own_tokens(ranks, block, (own, *args[1:]), kwargs)


def _of_own_tokens(ranks: TensorRanks, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Cut what a block is given beside hidden states to this rank's tokens."""
    if ranks.is_whole:
        return args, kwargs
    length = args[0].shape[SEQUENCE] * ranks.size
    others = [*args[1:], *kwargs.values()]
    if any(isinstance(other, torch.Tensor) and length in other.shape for other in others):
        raise CannotRun(
            f"cp splits the hidden states of {type(block).__name__}, which takes other tensors of their length too; use"
            " cp 1, or a model of transformers"
        )
    return args, kwargs


def _all_tokens(ranks: TensorRanks, block: nn.Module, args: Any, output: Any) -> Any:
    if ranks.is_whole:
        return output
    # Each rank's weights see its own tokens alone, and gradients are averaged over ranks.
    whole = all_chunks(scale_gradient(_first(output), ranks.size), ranks)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole
