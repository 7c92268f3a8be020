"""ModelFacts and parameter counts of a real `nn.Module`. Imports torch, as only the tracer beside it does too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.errors import BrokenFile, UnknownName
from planner.models.counting.weights import NOTHING, Weights, block_count, count_weights
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts
from planner.models.from_hf.config import facts_from_config
from strategies.parallel.blocks import is_row
from strategies.parallel.expert import is_mixture
from strategies.torch_compat.tensors import own_modules

_HEAD_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead")
_CHOSEN = ("top_k", "num_experts_per_tok", "experts_per_token")
_LENGTHS = ("block_size", "max_seq_len", "max_sequence_length", "n_positions", "n_ctx", "context_length")
_ACTIVATIONS: Mapping[type[nn.Module], str] = {nn.GELU: "gelu", nn.SiLU: "silu", nn.ReLU: "relu", nn.Tanh: "tanh"}
_Stack = tuple[str, tuple[nn.Module, ...]]


def meta_device() -> AbstractContextManager[Any]:
    """Modules made inside have shapes and no storage."""
    return torch.device("meta")


def facts_from_module(module: nn.Module, *, name: str = "") -> ModelFacts:
    """Return the facts of a module, whose parameter count is the module's own.

    A transformers model of a known model_type is described by its config. Anything else becomes kind `custom`: the
    blocks are the repeated children of its ModuleLists, and widths are read from embeddings and linear layers.
    """
    described = _described(module, name)
    measured = counts_from_module(module, described)
    if described is None:
        return _custom(module, name or type(module).__name__, measured)
    if measured.total == described.parameters and measured.trains_all:
        return described
    active = described.active_parameters + measured.total - described.parameters
    return replace(described, parameters=measured.total, active_parameters=active, measured_counts=measured)


def counts_from_module(module: nn.Module, described: ModelFacts | None = None) -> ParameterCounts:
    """Parameters of the module by component, each counted once, at its first name in registration order.

    Blocks are the modules of `described.block_class`, or else the repeated children of ModuleLists and Sequentials.
    """
    stacks = _stacks(module, described.block_class.split(",") if described else [])
    seen: set[int] = set()
    # The embedding comes before the blocks and the head after them, whatever the order of registration.
    outside = _outside(module, stacks)
    tables = [_take(part, seen) for part in outside if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    blocks = [_block(path, block, seen) for path, stack in stacks for block in stack]
    head = _take(_last_linear(outside), seen)
    return count_weights(embedding=sum(tables, NOTHING), blocks=_merge(blocks), head=head, other=_take(module, seen))


def _described(module: nn.Module, name: str) -> ModelFacts | None:
    return None if _freezes_layers(module) else facts_of_config(module, name=name)


def facts_of_config(module: nn.Module, *, name: str = "") -> ModelFacts | None:
    """Return the facts of a transformers model by its config, whatever is frozen; None where no form is known of it."""
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        return None
    values = {**to_dict(), "architectures": [type(module).__name__]}
    if any(head.out_features == values.get("vocab_size") for head in _linears(module)):
        # Loading a checkpoint that stores a head of its own (flan-t5) unties what the config says is tied.
        values["tie_word_embeddings"] = _is_tied(module)
    try:
        return facts_from_config(values, name or str(values.get("_name_or_path") or type(module).__name__))
    except (UnknownName, BrokenFile):
        return None  # a model_type or a variant that is only known from the module itself


def _freezes_layers(module: nn.Module) -> bool:
    """Return whether frozen weights change what layers keep; a table keeps the same (Pegasus freezes some)."""
    layers = (part for part in module.modules() if not isinstance(part, nn.Embedding))
    return not all(weight.requires_grad for part in layers for weight in part.parameters(recurse=False))


def _stacks(module: nn.Module, block_classes: list[str]) -> list[_Stack]:
    """Return the outermost repeated blocks, by the path of the container that holds them."""
    stacks: list[_Stack] = []
    _search(module, "", block_classes, stacks)
    return stacks


def _search(module: nn.Module, path: str, block_classes: list[str], stacks: list[_Stack]) -> None:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        blocks = _repeated(child, block_classes)
        if blocks:
            stacks.append((inner, blocks))
        else:
            _search(child, inner, block_classes, stacks)


def _repeated(container: nn.Module, block_classes: list[str]) -> tuple[nn.Module, ...]:
    if not is_row(container):
        return ()
    # children() would show a shared block once
    children = tuple(child for child in own_modules(container).values() if child is not None)
    classes = {type(child).__name__ for child in children}
    if block_classes:
        return children if classes and classes <= set(block_classes) else ()
    composite = all(any(True for _ in child.children()) and any(True for _ in child.parameters()) for child in children)
    return children if len(children) > 1 and len(classes) == 1 and composite else ()


def _take(module: nn.Module | None, seen: set[int]) -> Weights:
    """Return the parameters not seen before, which are marked as seen."""
    fresh = [parameter for parameter in module.parameters() if id(parameter) not in seen] if module is not None else []
    seen.update(map(id, fresh))
    frozen = tuple(index for index, parameter in enumerate(fresh) if not parameter.requires_grad)
    return Weights(shapes=tuple(tuple(parameter.shape) for parameter in fresh), frozen=frozen)


def _outside(module: nn.Module, stacks: list[_Stack]) -> list[nn.Module]:
    """Every part of the module that is in no block."""
    inside = {id(part) for _, stack in stacks for block in stack for part in block.modules()}
    return [part for part in module.modules() if id(part) not in inside]


def _last_linear(parts: list[nn.Module]) -> nn.Linear | None:
    """Return the output layer, as far as a module shows which one it is."""
    return next((part for part in reversed(parts) if isinstance(part, nn.Linear)), None)


def _block(path: str, block: nn.Module, seen: set[int]) -> BlockCount:
    experts = sum(
        parameter.numel()
        for name, parameter in block.named_parameters()
        if "experts" in name.split(".") and id(parameter) not in seen
    )
    return block_count(_role(path, experts), 1, _take(block, seen), experts)


def _role(path: str, experts: int) -> str:
    parts = ".".join(part for part in path.split(".") if not part.isdigit())
    for role in ("vision", "text_model", "decoder", "encoder"):
        if role in parts:
            return role.removesuffix("_model")
    return "moe" if experts else "decoder"


def _merge(blocks: list[BlockCount]) -> tuple[BlockCount, ...]:
    """Merge runs of equal blocks; blocks whose weights were all counted before (shared layers) add nothing."""
    merged: list[BlockCount] = []
    for block in blocks:
        if merged and replace(merged[-1], repeats=1) == block:
            merged[-1] = replace(merged[-1], repeats=merged[-1].repeats + 1)
        elif block.parameters:
            merged.append(block)
    sparse = any(block.name == "moe" for block in merged)
    return tuple(replace(block, name="dense") if sparse and block.name == "decoder" else block for block in merged)


def _custom(module: nn.Module, name: str, counts: ParameterCounts) -> ModelFacts:
    stacks = _stacks(module, [])
    longest = max((stack for _, stack in stacks), key=len, default=())
    block = longest[0] if longest else module
    hidden, vocabulary = _hidden_size(module, block), _vocabulary(module, _outside(module, stacks))
    heads = _heads(block, hidden)
    return ModelFacts(
        name=name,
        family="custom",
        model_type="custom",
        architecture=type(module).__name__,
        kind="custom",
        parameters=counts.total,
        active_parameters=counts.total,
        block_class=type(block).__name__ if longest else "",
        hidden_size=hidden,
        num_layers=max(sum(len(stack) for _, stack in stacks), 1),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=max((part.out_features for part in _linears(block)), default=4 * hidden),
        vocab_size=vocabulary,
        max_position_embeddings=_positions(module, hidden, vocabulary),
        tie_word_embeddings=_is_tied(module),
        norm="rmsnorm" if any("rms" in type(part).__name__.lower() for part in block.modules()) else "layernorm",
        activation=next((_ACTIVATIONS[type(part)] for part in block.modules() if type(part) in _ACTIVATIONS), "gelu"),
        hidden_dropout=max((part.p for part in block.modules() if isinstance(part, nn.Dropout)), default=0.0),
        measured_counts=counts,
        **_mixture(block),
    )


def _mixture(block: nn.Module) -> dict[str, Any]:
    """Return what facts say of routed experts, where a block has some in the form that expert parallelism takes."""
    experts: Any = next((part for part in block.modules() if is_mixture(part)), None)
    if experts is None:
        return {}
    named = (getattr(part, attribute, None) for part in block.modules() for attribute in _CHOSEN)
    return {
        "num_experts": experts.num_experts,
        "experts_per_token": next((count for count in named if isinstance(count, int) and count > 0), 1),
        "moe_intermediate_size": experts.down_proj.shape[-1],
    }


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    return (part for part in module.modules() if isinstance(part, nn.Linear))


def _embeddings(module: nn.Module) -> list[nn.Embedding]:
    return [part for part in module.modules() if isinstance(part, nn.Embedding)]


def _hidden_size(module: nn.Module, block: nn.Module) -> int:
    """Return the width of the largest embedding, the commonest input of linear layers, or the widest weight's."""
    tables = _embeddings(module)
    if tables:
        return max(tables, key=lambda table: table.num_embeddings).embedding_dim
    widths = Counter(part.in_features for part in (*_linears(block), *_linears(module)))
    if widths:
        return widths.most_common(1)[0][0]
    return max((parameter.shape[0] for parameter in module.parameters() if parameter.dim() > 1), default=1)


def _vocabulary(module: nn.Module, outside: list[nn.Module]) -> int:
    """Rows of the largest embedding, or outputs of the last linear layer."""
    tables, head = _embeddings(module), _last_linear(outside)
    if tables:
        return max(table.num_embeddings for table in tables)
    return head.out_features if head is not None else 0


def _heads(block: nn.Module, hidden: int) -> int:
    """Attention heads, where some part of the block names their number; otherwise one head as wide as the model."""
    for part in block.modules():
        for attribute in _HEAD_COUNTS:
            heads = getattr(part, attribute, None)
            if isinstance(heads, int) and heads > 0 and hidden % heads == 0:
                return heads
    return 1


def _positions(module: nn.Module, hidden: int, vocabulary: int) -> int:
    """Return the length named by the module or its config, or the rows of a second embedding as wide as the first."""
    for holder in (getattr(module, "config", None), module):
        for attribute in _LENGTHS:
            length = getattr(holder, attribute, None)
            if isinstance(length, int) and length > 0:
                return length
    rows = [table.num_embeddings for table in _embeddings(module) if table.embedding_dim == hidden]
    return max((count for count in rows if count < vocabulary), default=0)


def _is_tied(module: nn.Module) -> bool:
    tables = {id(table.weight) for table in _embeddings(module)}
    return any(id(part.weight) in tables for part in _linears(module))
