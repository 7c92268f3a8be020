"""Facts of real modules: transformers models by their config, anything else by its parts."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from planner.models.counting.count import count_parameters
from planner.models.facts import ParameterCounts
from strategies.tracing.live import counts_from_module, facts_from_module

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.2))


class TinyGpt(nn.Module):
    def __init__(self, *, tied: bool = True, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.positions = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 100, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def test_a_small_gpt_of_ones_own_is_described_by_its_parts() -> None:
    model = TinyGpt()
    facts = facts_from_module(model)
    assert (facts.kind, facts.name, facts.block_class, facts.architecture) == ("custom", "TinyGpt", "Block", "TinyGpt")
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.head_dim) == (3, 32, 4, 8)
    assert (facts.vocab_size, facts.max_position_embeddings, facts.intermediate_size) == (100, 64, 128)
    assert (facts.tie_word_embeddings, facts.hidden_dropout, facts.activation) == (True, 0.2, "gelu")
    assert facts.parameters == _elements(model) == count_parameters(facts).total


@pytest.mark.parametrize("tied", [True, False])
def test_components_of_a_module_add_up_and_tied_weights_count_once(tied: bool) -> None:
    model = TinyGpt(tied=tied)
    counts = counts_from_module(model)
    assert counts.embedding == 164 * 32
    assert counts.head == (0 if tied else 3200)
    assert counts.other == 64
    (block,) = counts.blocks
    assert (block.repeats, block.parameters, block.largest_matrix) == (3, _elements(model.blocks[0]), 32 * 128)
    assert counts.total == _elements(model)


def test_shared_blocks_count_once() -> None:
    model = TinyGpt(layers=1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    counts = counts_from_module(model)
    assert [block.repeats for block in counts.blocks] == [1]
    assert counts.total == _elements(model)


def test_a_module_without_embedding_or_blocks_is_still_counted() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    facts = facts_from_module(model, name="mlp")
    assert (facts.name, facts.parameters, facts.vocab_size, facts.block_class) == ("mlp", 325, 5, "")
    assert (facts.num_heads, facts.num_layers) == (1, 1)


def test_a_convolutional_model_is_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3))
    facts = facts_from_module(model)
    assert facts.parameters == _elements(model)
    assert facts.hidden_size == 16


def test_a_module_without_parameters_has_none() -> None:
    assert facts_from_module(nn.ReLU()).parameters == 0


def _llama(**changes: object) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50, **changes)
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_a_transformers_model_is_described_by_its_config() -> None:
    model = _llama()
    facts = facts_from_module(model)
    assert (facts.kind, facts.model_type, facts.block_class) == ("decoder", "llama", "LlamaDecoderLayer")
    assert (facts.num_kv_heads, facts.measured_counts) == (2, None)
    assert facts.parameters == _elements(model)


def test_what_was_added_to_a_transformers_model_is_counted() -> None:
    model = _llama()
    model.adapter = nn.Linear(64, 8, bias=False)
    facts = facts_from_module(model)
    assert facts.parameters == facts.active_parameters == count_parameters(facts).total == _elements(model)
    assert facts.measured_counts is not None


def test_a_head_untied_by_its_checkpoint_is_seen() -> None:
    config = transformers.T5Config(vocab_size=100, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config)
    assert facts_from_module(model).tie_word_embeddings is True
    model.lm_head.weight = nn.Parameter(torch.zeros(100, 16))
    facts = facts_from_module(model)
    assert (facts.tie_word_embeddings, facts.parameters) == (False, _elements(model))


def test_a_transformers_model_of_an_unknown_type_is_described_by_its_parts() -> None:
    config = transformers.XGLMConfig(
        vocab_size=50, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=16
    )
    with torch.device("meta"):
        model = transformers.XGLMForCausalLM(config)
    facts = facts_from_module(model)
    assert (facts.kind, facts.block_class, facts.num_layers) == ("custom", "XGLMDecoderLayer", 2)
    assert facts.parameters == _elements(model)


def test_mixture_of_experts_blocks_are_told_apart() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, vocab_size=50,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    counts = counts_from_module(model)
    assert [(block.name, block.repeats) for block in counts.blocks] == [("dense", 1), ("moe", 2)]
    assert counts.blocks[1].experts == 8 * 3 * 64 * 32
    assert _in_any_order(counts) == _in_any_order(count_parameters(facts_from_module(model)))


def _in_any_order(counts: ParameterCounts) -> ParameterCounts:
    blocks = tuple(replace(block, shapes=tuple(sorted(block.shapes))) for block in counts.blocks)
    return replace(counts, blocks=blocks, outside=tuple(sorted(counts.outside)))


def test_routed_experts_of_ones_own_are_seen() -> None:
    sys.path.insert(0, str(EXAMPLES))
    example = import_module("train_gpt")
    sizes = {"layers": 2, "width": 16, "heads": 2, "length": 8}
    facts = facts_from_module(example.Gpt(**sizes, experts=4))
    assert (facts.num_experts, facts.experts_per_token, facts.moe_intermediate_size) == (4, 2, 32)
    assert not facts_from_module(example.Gpt(**sizes)).is_moe
