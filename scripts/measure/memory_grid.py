"""The runs that have their memory measured: small models of many families on CPU ranks, full-size ones on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hardware_db.units import GIB
from planner import vocabulary as words

_USUAL = {"num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 2048}
_GROUPED = {**_USUAL, "hidden_size": 320, "num_key_value_heads": 2, "intermediate_size": 864, "vocab_size": 2048}
SMALL: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_GROUPED, "tie_word_embeddings": False},
    "llama-wide-vocabulary": {**_GROUPED, "hidden_size": 256, "intermediate_size": 704, "vocab_size": 12288},
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 80},
    "mistral": {**_GROUPED, "sliding_window": None},
    "mixtral": {
        **_GROUPED,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma2": {**_GROUPED, "head_dim": 80},
    "phi3": {**_GROUPED, "pad_token_id": 0},
    "gpt2": {"n_embd": 320, "n_layer": 6, "n_head": 4, "vocab_size": 2048, "n_positions": 2048},
    "opt": {**_USUAL, "hidden_size": 320, "word_embed_proj_dim": 320, "ffn_dim": 1280, "vocab_size": 2048},
    "gpt_neox": {**_USUAL, "hidden_size": 320, "intermediate_size": 1280, "vocab_size": 2048},
    "bert": {**_USUAL, "hidden_size": 320, "intermediate_size": 1280, "vocab_size": 4096},
    "t5": {
        "d_model": 256,
        "d_ff": 1024,
        "d_kv": 64,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 4096,
        "decoder_start_token_id": 0,
    },
}
"""Sizes of a model_type's config, named by it (up to the first hyphen); 8 to 16 million parameters."""
FULL: Mapping[str, Mapping[str, Any]] = {
    "qwen2-0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-1.2b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gpt2-774m": {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024, "vocab_size": 50257},
    "opt-1.3b": {
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "ffn_dim": 8192,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
    "bert-335m": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30522,
    },
    "llama-6.7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}
"""Published models by their sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run to measure; `memory_fraction` is the part of its GPU that a process may take."""

    model: str
    config: Mapping[str, Any]
    strategy: words.Strategy
    world_size: int = 1
    micro_batch: int = 2
    length: int = 256
    accumulation: int = 1
    precision: words.Precision = "fp32"
    optimizer: words.Optimizer = "adamw"
    attention: words.Attention = "sdpa"
    checkpointing: words.Checkpointing = "none"
    offload: words.Offload = "none"
    memory_fraction: float = 1.0

    @property
    def model_config(self) -> dict[str, Any]:
        """The transformers config with its `model_type`."""
        return {"model_type": self.model.split("-")[0], **self.config}


def _small(model: str, strategy: words.Strategy, world_size: int, **how: Any) -> Case:
    return Case(model=model, config=SMALL[model], strategy=strategy, world_size=world_size, **how)


def cpu_grid() -> Iterator[Case]:
    """Every strategy over one model at several world sizes, then over other models what else a run can differ in."""
    strategies: tuple[tuple[words.Strategy, int], ...] = (
        *(("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 4), ("fsdp-grad-op", 2)),
        *(("zero1", 1), ("zero1", 2), ("zero1", 3), ("zero2", 2), ("zero2", 4), ("zero3", 2), ("zero3", 3)),
    )
    for strategy, ranks in strategies:
        yield _small("llama", strategy, ranks)
    for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        yield from _varied(strategy)
    yield from (_small(model, "fsdp-grad-op", 2, **how) for model, how in _VARIATIONS[:4])


def _varied(strategy: words.Strategy) -> Iterator[Case]:
    """One difference or two at a time, over a family each, and what only some strategies can do."""
    for model, how in _VARIATIONS:
        yield _small(model, strategy, 2, **how)
    if strategy != "fsdp":
        yield _small("qwen3", strategy, 2, optimizer="adafactor")
    if strategy != "zero1":
        yield _small("qwen3", strategy, 2, precision="bf16-pure")
    if strategy == "zero3":  # FSDP's offload moves nothing where the device is the host
        yield _small("llama", strategy, 2, offload="all")
    if strategy in ("zero1", "zero2", "zero3"):
        yield _small("llama", strategy, 2, offload="optimizer")
        yield _small("gpt2", strategy, 2, precision="bf16", offload="optimizer", accumulation=2)


_VARIATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2", {"precision": "bf16"}),
    ("opt", {"precision": "bf16", "checkpointing": "full", "micro_batch": 4}),
    ("gpt_neox", {"precision": "bf16", "accumulation": 2, "micro_batch": 1}),
    ("qwen2", {"precision": "bf16", "optimizer": "adamw-fused"}),
    ("mixtral", {"precision": "bf16"}),
    ("bert", {"micro_batch": 4, "length": 128}),
    ("t5", {"length": 128}),
    ("llama-wide-vocabulary", {"precision": "bf16", "optimizer": "adamw-forloop", "length": 128}),
    ("phi3", {"checkpointing": "full", "optimizer": "sgd", "length": 512, "micro_batch": 1}),
    ("gemma2", {"precision": "bf16", "attention": "eager"}),
    ("mistral", {"precision": "bf16", "checkpointing": "selective", "length": 512, "micro_batch": 1}),
)


CPU_GRID = tuple(cpu_grid())


def gpu_grid(total_bytes: int) -> Iterator[Case]:
    """Return runs for one GPU of `total_bytes`, the most telling first.

    Full-size models alone, then under limits set on purpose, then ranks that share the card. Runs that can use the same
    processes follow one another.
    """
    alone = [
        _full("qwen2-0.5b", length=2048),
        _full("llama-1.2b", length=2048, micro_batch=4),
        _full("gpt2-774m", length=1024, micro_batch=4),
        _full("opt-1.3b", length=2048),
        _full("bert-335m", length=512, micro_batch=16),
        _full("llama-1.2b", precision="bf16-pure", length=8192),
        _full("qwen2-0.5b", precision="fp32", length=1024, micro_batch=4),
        _full("llama-6.7b", precision="bf16-pure", length=2048),
    ]
    yield from alone
    for case, change in product(alone[:5], _CHANGES):
        yield replace(case, **change)
    # The process may take this much of the card: some of these runs must end as they were predicted to, within 5 %.
    for case, gibibytes in product((alone[0], alone[2], alone[4]), (8, 10, 12, 14, 16, 18, 20, 24)):
        yield replace(case, memory_fraction=min(gibibytes * GIB / total_bytes, 1.0))
    replicated: tuple[words.Strategy, ...] = ("ddp", "fsdp", "fsdp-grad-op")
    zero: tuple[words.Strategy, ...] = ("zero1", "zero2", "zero3")
    for world_size, strategies in product((1, 2, 4), (replicated, zero)):
        for strategy, case in product(strategies, alone[:4]):
            yield replace(case, strategy=strategy, world_size=world_size, micro_batch=1)


def _full(model: str, *, precision: words.Precision = "bf16", length: int, micro_batch: int = 2) -> Case:
    config = FULL[model]
    return Case(
        model=model, config=config, strategy="single", precision=precision, length=length, micro_batch=micro_batch
    )


_CHANGES: tuple[dict[str, Any], ...] = (
    {"checkpointing": "full", "micro_batch": 8},
    {"checkpointing": "selective"},
    {"optimizer": "adamw-fused"},
    {"optimizer": "adamw-forloop"},
    {"optimizer": "sgd"},
    {"optimizer": "adafactor"},
    {"attention": "eager", "length": 512},
    {"accumulation": 2},
    {"micro_batch": 1, "length": 512},
)
