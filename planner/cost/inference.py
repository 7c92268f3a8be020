"""The memory of serving: weights, and keys and values of the sequences that are served at a time.

A token leaves a key and a value per layer and key-value head, `2 * layers * kv_heads * head_dim` numbers (Pope et al.
2022, arXiv:2211.05102, section 2; with grouped heads Ainslie et al. 2023, arXiv:2305.13245). Multi-head latent
attention leaves `kv_lora_rank + qk_rope_head_dim` per layer instead (DeepSeek-V2, arXiv:2405.04434, table 1). A layer
with a sliding window keeps no more tokens than its window. Encoder-decoders keep the source's keys and values of every
decoder layer too.

Over several GPUs the model is split as serving engines split it, tensor-parallel: attention heads divide by the number
of GPUs, key-value heads are held more than once where there are fewer of them, and a latent is held on every GPU.
Quantized weights are not counted. A tenth of each GPU is left to activations and the runtime, as vLLM's default
`gpu_memory_utilization` 0.9 leaves it.
"""

from __future__ import annotations

import math

from hardware_db.records import dataclass
from planner.errors import ContradictoryRequest
from planner.models.facts import ModelFacts

USABLE_SHARE = 0.9
"""Of a GPU's memory, for weights and the cache."""
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "bf16-pure": 2, "fp8": 2, "fp4": 2}
"""Of a weight, a key or a value in each precision; those of fp8 and fp4 training are bf16."""
_CACHING = ("decoder", "vision-language", "encoder-decoder", "speech-encoder-decoder")
_ENCODING = ("encoder", "vision", "vision-text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """One way to serve a model; bytes are those of one GPU."""

    gpus: int
    """GPUs that hold one copy of the model together."""
    weights_bytes: int
    """Of weights on each."""
    cache_bytes_per_sequence: int
    """Of keys and values of one sequence at its full length, on each; 0 for a model that generates nothing."""
    sequences: int
    """How many are served at a time."""
    usable_bytes: int
    """What a GPU has for both."""

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all sequences on one GPU."""
        return self.cache_bytes_per_sequence * self.sequences

    @property
    def used_bytes(self) -> int:
        """Weights, keys and values on one GPU."""
        return self.weights_bytes + self.cache_bytes

    @property
    def fits(self) -> bool:
        """True if a GPU has room for both."""
        return self.used_bytes <= self.usable_bytes

    @property
    def most_sequences(self) -> int | None:
        """Full sequences that have room at a time; None where sequences leave nothing behind."""
        if not self.cache_bytes_per_sequence:
            return None
        return max(0, self.usable_bytes - self.weights_bytes) // self.cache_bytes_per_sequence


def cached_values_per_sequence(facts: ModelFacts, tokens: int) -> tuple[int, int]:
    """Numbers that the cache holds of one sequence: those that divide over key-value heads, and a latent's.

    Raises:
        ContradictoryRequest: nothing is known of the model's attention.
    """
    if facts.kind in _ENCODING:
        return 0, 0
    if facts.kind not in _CACHING or not facts.num_heads:
        raise ContradictoryRequest(
            f"{facts.name} is a {facts.kind} model, and what it keeps of a sequence is not known; name one of `dsplan"
            " models`"
        )
    layers = facts.decoder_layers or facts.num_layers
    if facts.mla is not None:
        return 0, layers * tokens * (facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim)
    heads = facts.num_kv_heads or facts.num_heads
    width = facts.head_dim or facts.hidden_size // facts.num_heads
    local = facts.window_share if facts.sliding_window else 0.0
    in_window = min(tokens, facts.sliding_window or tokens)
    positions = math.ceil(layers * ((1 - local) * tokens + local * in_window))
    if facts.kind.endswith("encoder-decoder"):
        positions += layers * (facts.max_source_positions or tokens)
    return 2 * heads * width * positions, 0


def serving_on(
    facts: ModelFacts, gpus: int, *, capacity_bytes: int, tokens: int, sequences: int, bytes_per_value: int
) -> Serving:
    """Return the memory of a model that so many GPUs serve, `sequences` of `tokens` (prompt and answer) at a time."""
    by_head, latent = cached_values_per_sequence(facts, tokens)
    holders = min(gpus, facts.num_kv_heads or facts.num_heads or gpus)
    return Serving(
        gpus=gpus,
        weights_bytes=-(-facts.parameters * bytes_per_value // gpus),
        cache_bytes_per_sequence=(-(-by_head // holders) + latent) * bytes_per_value,
        sequences=sequences,
        usable_bytes=int(capacity_bytes * USABLE_SHARE),
    )


def possible_counts(facts: ModelFacts, most: int) -> tuple[int, ...]:
    """Numbers of GPUs, up to `most`, that a model's attention heads divide by."""
    heads = max(1, facts.num_heads)
    return tuple(gpus for gpus in range(1, min(most, heads) + 1) if heads % gpus == 0)
