"""The runs that have their step timed: three models under every strategy on CPU ranks, plans of one GPU on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from planner import vocabulary as words
from scripts.measure.memory_grid import FULL, Case

STRATEGIES: tuple[words.Strategy, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3")
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-14m": {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": 8192, "n_positions": 512},
    "llama-21m": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 16384,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "bert-13m": {
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 12288,
        "max_position_embeddings": 512,
    },
}
"""Sizes of a model_type's config, named by it (up to the first hyphen)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model and a batch that every strategy is asked to train."""

    model: str
    micro_batch: int
    length: int
    accumulation: int = 1
    precision: words.Precision = "fp32"

    def case(self, strategy: words.Strategy, world_size: int) -> Case:
        """Return the setting under one strategy."""
        return Case(
            model=self.model,
            config=MODELS[self.model],
            strategy=strategy,
            world_size=world_size,
            micro_batch=self.micro_batch,
            length=self.length,
            accumulation=self.accumulation,
            precision=self.precision,
        )


SETTINGS = (
    Setting(model="gpt2-14m", micro_batch=1, length=128),
    Setting(model="gpt2-14m", micro_batch=4, length=128),
    Setting(model="llama-21m", micro_batch=1, length=64),
    Setting(model="llama-21m", micro_batch=2, length=256),
    Setting(model="bert-13m", micro_batch=2, length=64),
    Setting(model="bert-13m", micro_batch=2, length=128, accumulation=2),
)
WORLD_SIZES = (2, 4)


def cpu_grid() -> Iterator[tuple[Case, ...]]:
    """Return groups of cases that differ in the strategy alone."""
    for world_size, setting in product(WORLD_SIZES, SETTINGS):
        yield tuple(setting.case(strategy, world_size) for strategy in STRATEGIES)


def gpu_grid() -> Iterator[tuple[Case, ...]]:
    """Plans for one GPU, a group a model: what a user can change, offload included; the most telling models first."""
    for name, (length, micro_batch) in _ALONE.items():
        usual = Case(
            model=name,
            config=FULL[name],
            strategy="single",
            precision="bf16",
            length=length,
            micro_batch=micro_batch,
        )
        changes = (*_CHANGES, *(_OFFLOADS if name in _OFFLOADED else ()))
        yield tuple(replace(usual, **change) for change in changes)


_ALONE: Mapping[str, tuple[int, int]] = {
    "llama-1.2b": (2048, 4),
    "qwen2-0.5b": (2048, 2),
    "gpt2-774m": (1024, 4),
    "opt-1.3b": (2048, 2),
    "bert-335m": (512, 16),
}
"""Sequence length and micro-batch."""

_OFFLOADED = ("llama-1.2b", "gpt2-774m", "bert-335m")

_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full", "micro_batch": 8},
    {"micro_batch": 1, "length": 512},
    {"accumulation": 2},
    {"optimizer": "adamw-fused"},
    {"optimizer": "sgd"},
    {"attention": "eager", "length": 512},
    {"precision": "bf16-pure"},
    {"precision": "fp32", "micro_batch": 1},
)
_OFFLOADS: tuple[dict[str, Any], ...] = (
    {"strategy": "zero2"},
    {"strategy": "zero2", "offload": "optimizer"},
    {"strategy": "zero2", "offload": "optimizer", "accumulation": 4},
    {"strategy": "zero3", "offload": "all"},
    {"strategy": "fsdp", "offload": "all"},
)
