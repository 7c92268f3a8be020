"""Counts of which only parts are trained: parts that are frozen by name, and adapters beside frozen weights.

Names are those of transformers. Adapters are PEFT's (0.21): a target is a linear layer of a block; a list of names
means modules that are called so or end in `.name`, anything else is a regular expression over the whole name
(`tuners_utils.check_target_module_exists`). `all-linear` are all linear layers but the output head; experts and
routers are no linear layers but parameters of their own modules, which PEFT leaves out (transformers 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from planner.errors import ContradictoryRequest
from planner.models.facts import Adapter, BlockCount, ModelFacts, ParameterCounts, Shape

# How model types spell the parts that `planner.models.counting.weights` names; what a table lacks is Llama's.


_LLAMA = {
    "block": "model.layers.",
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv", "q_a", "q_b", "kv_b")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down", "gate_up")},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm", "sinks")},
    **{f"shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"experts.{name}": f"mlp.experts.{name}_proj" for name in ("gate_up", "up", "down")},
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "q_a_norm": "self_attn.q_a_layernorm",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_expert_gate",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "tokens": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "classifier": "score",
}
_GPT2 = {
    "block": "transformer.h.",
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "final_norm": "transformer.ln_f",
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
}
_BLOOM = {
    "block": "transformer.h.",
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "tokens": "transformer.word_embeddings",
    "final_norm": "transformer.ln_f",
    "embedding_norm": "transformer.word_embeddings_layernorm",
}
_FOUR_NORMS = {"norm3": "pre_feedforward_layernorm", "norm4": "post_feedforward_layernorm"}
_BERT_HEAD = {"head": "", "head_dense": ".transform.dense", "head_norm": ".transform.LayerNorm"}
_ROBERTA_HEAD = {"head": "", "head_dense": ".dense", "head_norm": ".layer_norm"}
_SPELLED: Mapping[str, Mapping[str, str]] = {
    **{name: {} for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "granite", "smollm3", "internlm3")},
    **{name: {} for name in ("qwen3_moe", "deepseek_v3", "deepseek_v2", "olmo", "stablelm", "mixtral")},
    "gemma2": _FOUR_NORMS,
    "gemma3_text": _FOUR_NORMS,
    "olmo2": {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
    "qwen2_moe": {f"shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "starcoder2": {"up": "mlp.c_fc", "down": "mlp.c_proj"},
    "phi": {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "final_norm": "model.final_layernorm"},
    "opt": {
        "block": "model.decoder.layers.",
        "o": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
        "norm1": "self_attn_layer_norm",
        "norm2": "final_layer_norm",
        "tokens": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
    },
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {
        "block": "gpt_neox.layers.",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "tokens": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
    },
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    **{
        name: {
            "block": f"{stem}.encoder.layer.",
            "q": "attention.self.query",
            "k": "attention.self.key",
            "v": "attention.self.value",
            "o": "attention.output.dense",
            "up": "intermediate.dense",
            "down": "output.dense",
            "norm1": "attention.output.LayerNorm",
            "norm2": "output.LayerNorm",
            "tokens": f"{stem}.embeddings.word_embeddings",
            "positions": f"{stem}.embeddings.position_embeddings",
            "types": f"{stem}.embeddings.token_type_embeddings",
            "embedding_norm": f"{stem}.embeddings.LayerNorm",
            "classifier": "classifier",
            **{part: f"{head}{spelled}" for part, spelled in parts.items()},
        }
        for name, stem, head, parts in (
            ("bert", "bert", "cls.predictions", _BERT_HEAD),
            ("roberta", "roberta", "lm_head", _ROBERTA_HEAD),
            ("xlm-roberta", "roberta", "lm_head", _ROBERTA_HEAD),
        )
    },
}
_ATTENTION = frozenset({"q", "k", "v", "o", "qkv", "q_a", "q_b", "kv_a", "kv_b"})
_NO_LINEAR = ("router", "experts.")


def is_linear(name: str, shape: Shape) -> bool:
    """Return whether a weight of a block is a linear layer's: what PEFT adapts, and bitsandbytes quantises."""
    return len(shape) == 2 and name.endswith(".weight") and not name.startswith(_NO_LINEAR)


def module_of(facts: ModelFacts, name: str) -> str:
    """Return a module as transformers calls it, without what is in front of the block."""
    role = name.rpartition(".")[0] or name
    return _SPELLED.get(facts.model_type, {}).get(role) or _LLAMA.get(role, role)


def _parameter(facts: ModelFacts, name: str, block: str = "") -> str:
    _, _, kind = name.rpartition(".")
    ending = f".{kind}" if kind in ("weight", "bias") and not name.startswith("experts.") else ""
    return f"{block}{module_of(facts, name)}{ending}"


def _block_stem(facts: ModelFacts) -> str:
    return _SPELLED.get(facts.model_type, {}).get("block", _LLAMA["block"])


# Adapters.


def with_adapters(
    facts: ModelFacts, counts: ParameterCounts, *, rank: int, targets: str, magnitude: bool
) -> ParameterCounts:
    """Return the counts with everything frozen and adapters beside the targets.

    Raises:
        ContradictoryRequest: no linear layer of the model is meant, its weights have no known names, or the pattern is
            no regular expression.
    """
    if not counts.blocks or not all(block.names for block in counts.blocks):
        raise ContradictoryRequest(
            f"nothing is known of the linear layers of {facts.name}, which adapters go beside; hand dsplan the module"
            " with its adapters (--model package.module:factory)"
        )
    blocks = tuple(_adapt(facts, block, rank, targets, magnitude=magnitude) for block in counts.blocks)
    if not any(block.adapters for block in blocks):
        linears = ", ".join(linear_modules(facts, counts))
        raise ContradictoryRequest(f"--lora-targets {targets} means no linear layer of {facts.name}; it has {linears}")
    return replace(counts, blocks=blocks, frozen=tuple(range(len(counts.outside))))


def _adapt(facts: ModelFacts, block: BlockCount, rank: int, targets: str, *, magnitude: bool) -> BlockCount:
    adapters = []
    for name, shape in zip(block.names, block.shapes, strict=True):
        if is_linear(name, shape) and _is_meant(facts, name, targets):
            outputs, inputs = reversed(shape) if facts.model_type in ("gpt2",) else shape
            adapters.append(Adapter(name=name, inputs=inputs, outputs=outputs, rank=rank, magnitude=magnitude))
    added = tuple(shape for adapter in adapters for shape in adapter.shapes)
    sizes = sum(adapter.rank * (adapter.inputs + adapter.outputs) for adapter in adapters)
    sizes += sum(adapter.outputs for adapter in adapters if adapter.magnitude)
    return replace(
        block,
        parameters=block.parameters + sizes,
        shapes=block.shapes + added,
        names=block.names + tuple("adapter" for _ in added),
        frozen=tuple(range(len(block.shapes))),
        adapters=tuple(adapters),
    )


def _is_meant(facts: ModelFacts, name: str, targets: str) -> bool:
    role = name.rpartition(".")[0]
    if targets == "all-linear":
        return True
    if targets == "attention":
        return role.rpartition(".")[2] in _ATTENTION
    module = f"{_block_stem(facts)}0.{module_of(facts, name)}"
    if re.fullmatch(r"[\w., ]+", targets):
        wanted = [part.strip() for part in targets.split(",") if part.strip()]
        return any(module == each or module.endswith(f".{each}") for each in wanted)
    return _pattern("--lora-targets", targets).fullmatch(module) is not None


def linear_modules(facts: ModelFacts, counts: ParameterCounts, targets: str = "all-linear") -> list[str]:
    """Return the names that the targeted linear layers have in their blocks: `q_proj`, `down_proj`."""
    named = [
        module_of(facts, name).rpartition(".")[2]
        for block in counts.blocks
        for name, shape in zip(block.names, block.shapes, strict=True)
        if is_linear(name, shape) and _is_meant(facts, name, targets)
    ]
    return list(dict.fromkeys(named))


def _pattern(flag: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as problem:
        raise ContradictoryRequest(f"{flag} {text} is no regular expression: {problem}") from None


# Parts that are frozen by name.


def freeze_but(facts: ModelFacts, counts: ParameterCounts, pattern: str) -> ParameterCounts:
    """Return the counts with all weights frozen but those in whose names the pattern is found.

    Runs of blocks that differ become block counts of their own.

    Raises:
        ContradictoryRequest: the names are not known, none or all of them match, or it is no regular expression.
    """
    if facts.model_type not in _SPELLED or not counts.names:
        raise ContradictoryRequest(
            f"the names of the weights of {facts.name} are not known, which --train-only needs; freeze them in the"
            " module and hand dsplan that (--model package.module:factory)"
        )
    wanted = _pattern("--train-only", pattern)
    outside = [_parameter(facts, name) for name in counts.names]
    frozen = tuple(index for index, name in enumerate(outside) if not wanted.search(name))
    blocks: list[BlockCount] = []
    first = 0
    for block in counts.blocks:
        blocks += _runs(facts, block, first, wanted)
        first += block.repeats
    partly_frozen = replace(counts, blocks=tuple(blocks), frozen=frozen)
    if not partly_frozen.trained.total:
        examples = ", ".join((*outside[:1], *_names_in(facts, counts.blocks[0], 0)[:2], *outside[-1:]))
        raise ContradictoryRequest(
            f"--train-only {pattern} matches no weight of {facts.name}; names are like {examples}"
        )
    if partly_frozen.trains_all:
        raise ContradictoryRequest(f"--train-only {pattern} matches every weight of {facts.name}; leave it out")
    return partly_frozen


def _runs(facts: ModelFacts, block: BlockCount, first: int, wanted: re.Pattern[str]) -> Iterator[BlockCount]:
    each = [_frozen_in(facts, block, index, wanted) for index in range(first, first + block.repeats)]
    for frozen, alike in groupby(each):
        yield replace(block, repeats=len(list(alike)), frozen=frozen)


def _frozen_in(facts: ModelFacts, block: BlockCount, block_index: int, wanted: re.Pattern[str]) -> tuple[int, ...]:
    names = _names_in(facts, block, block_index)
    return tuple(index for index, name in enumerate(names) if not wanted.search(name))


def _names_in(facts: ModelFacts, block: BlockCount, index: int) -> Sequence[str]:
    return [_parameter(facts, name, f"{_block_stem(facts)}{index}.") for name in block.names]
