"""Closed forms of one block against the tensors that the real modules save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.memory.recipe import Recipe
from planner.memory.saved import Rules, Stack, block_bytes
from planner.models.hf_config import facts_from_config
from tests.memory.saved_tensors import BATCH, LENGTH, block_bytes_traced, config_of

RECIPES = {
    "fp32": Recipe(weight=4, gradient=4, master=0, state=8, compute=4, residual=4, gather=4, reduce=4, autocast=False),
    "autocast": Recipe(
        weight=4, gradient=4, master=0, state=8, compute=2, residual=4, gather=4, reduce=4, autocast=True
    ),
    "pure": Recipe(weight=2, gradient=2, master=0, state=4, compute=2, residual=2, gather=2, reduce=2, autocast=False),
}
SDPA = [
    *("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt_neox", "bert", "roberta"),
    *("granite", "olmo2", "stablelm", "starcoder2", "gpt_bigcode", "mixtral", "qwen2_moe", "modernbert"),
]
EAGER = ["opt", "llama", "gemma", "gptj", "bloom", "mpt", "bert", "gpt_neox", "mixtral"]
# A block's tables and per-token statistics that the closed form leaves out are below this share of it.
ALLOWANCE = 0.01

CASES = [(name, precision, "sdpa") for name in SDPA for precision in RECIPES]
CASES += [(name, precision, "eager") for name in EAGER for precision in ("fp32", "pure")]


@pytest.mark.parametrize(("model_type", "precision", "attention"), CASES)
def test_block_keeps_what_autograd_saves(model_type: str, precision: str, attention: str) -> None:
    facts = replace(facts_from_config(config_of(model_type, 2).to_dict(), model_type), attention_dropout=0.0)
    eager = attention == "eager" or facts.eager_only
    rules = Rules(facts=facts, recipe=RECIPES[precision], eager=eager, on_cpu=True)
    stack = Stack(
        layers=1,
        tokens=BATCH * LENGTH,
        length=LENGTH,
        hidden=facts.hidden_size,
        query=facts.num_heads * facts.head_dim,
        key_value=facts.num_kv_heads * facts.head_dim,
        heads=facts.num_heads,
        intermediate=facts.intermediate_size,
    )
    assert block_bytes(rules, stack) == pytest.approx(
        block_bytes_traced(model_type, precision, attention), rel=ALLOWANCE
    )
