"""Parameter counts against the real model on the meta device, for every row that transformers can build."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from planner.models import compile
from planner.models.catalogue import find_model, models
from planner.models.counting.count import active_parameters, count_parameters
from planner.models.facts import ModelFacts
from planner.models.from_hf.reader import find_architecture
from strategies.tracing import to_hf as builder
from strategies.tracing.live import counts_from_module
from tests.planner.models.hf_modules import meta_model, real_count

ROWS: Mapping[str, Mapping[str, object]] = {
    row["id"]: row
    for row in yaml.load(
        (compile.HERE / "catalogue.yaml").read_text(encoding="utf-8"),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )["models"]
}
BUILDABLE = [facts for facts in models() if facts.model_type not in builder.NOT_IN_TRANSFORMERS]
NATIVE = [facts for facts in BUILDABLE if facts.model_type not in builder.STAND_INS]
FIRST_OF_TYPE = {facts.model_type: facts for facts in reversed(NATIVE)}

# Why our count is not the row's `params_formula`, by model_type.
FORMULA_DIFFERS = {
    "deberta-v2": "the column is DebertaV2Model; the row's architecture adds the masked-LM head",
    "albert": "the column is AlbertModel with its pooler; AlbertForMaskedLM has a head instead",
    "pegasus": "the column leaves out the two sinusoidal tables, which transformers keeps as frozen parameters",
}
# Why our count is not the row's `params_instantiated`, by family.
INSTANTIATED_DIFFERS = {
    "deberta-v3": "the column instantiated DebertaV2Model",
    "flan-t5": "the column was built from the config, which ties; the checkpoint's own head is counted",
    "mt5": "the column was built from the config, which ties; the checkpoint's own head is counted",
}


def _name(facts: ModelFacts) -> str:
    return facts.name


@pytest.mark.parametrize("facts", BUILDABLE, ids=_name)
@pytest.mark.sweep(every=6, suite=lambda facts: FIRST_OF_TYPE.get(facts.model_type, facts) is facts)
def test_count_is_that_of_the_model_on_the_meta_device(facts: ModelFacts) -> None:
    model = meta_model(builder.hf_config(facts), facts)
    assert count_parameters(facts).total == facts.parameters == real_count(model)


def test_only_one_row_cannot_be_built() -> None:
    assert {facts.name for facts in models()} - {facts.name for facts in BUILDABLE} == {
        "deepseek-ai/deepseek-moe-16b-base"
    }


def test_counts_agree_with_the_formula_column_or_are_explained() -> None:
    differ = {facts.model_type for facts in models() if facts.parameters != ROWS[facts.name]["params_formula"]}
    assert differ == set(FORMULA_DIFFERS)


def test_counts_agree_with_the_instantiated_column_or_are_explained() -> None:
    differ = {facts.family for facts in BUILDABLE if facts.parameters != ROWS[facts.name]["params_instantiated"]}
    assert differ == set(INSTANTIATED_DIFFERS)


def test_exactly_published_counts_are_met() -> None:
    exact = [facts for facts in models() if ROWS[facts.name]["params_published_basis"] == "exact"]
    differ = {facts.name for facts in exact if facts.parameters != ROWS[facts.name]["params_published"]}
    assert len(exact) > 200
    # The sinusoidal tables of Pegasus are not in its checkpoint.
    assert differ == {"google/pegasus-large"}


def test_active_parameters_of_mixtures_agree_with_their_column() -> None:
    sparse = [facts for facts in models() if facts.is_moe]
    assert len(sparse) == 20
    for facts in sparse:
        assert facts.active_parameters == ROWS[facts.name]["active_params_formula"], facts.name
    assert all(facts.active_parameters == facts.parameters for facts in models() if not facts.is_moe)


@pytest.mark.parametrize("facts", FIRST_OF_TYPE.values(), ids=lambda facts: str(facts.model_type))
@pytest.mark.sweep(every=2)
def test_blocks_are_those_of_the_real_model(facts: ModelFacts) -> None:
    """Size, number, experts and largest tensor of the blocks, found in the module by the class in the catalogue."""
    short = builder.shortened(facts, 3)
    model = meta_model(builder.hf_config(short), short)
    counted, real = count_parameters(short), counts_from_module(model, short)
    # T5 keeps the table of relative positions in the first block; it counts as `other`.
    table = facts.relative_attention_num_buckets * facts.num_heads
    assert real.blocks
    expanded = [(b.parameters, b.experts, b.largest_matrix) for b in real.blocks for _ in range(b.repeats)]
    for first in (0, 3) if table else ():
        expanded[first] = (expanded[first][0] - table, *expanded[first][1:])
    formula = [(b.parameters, b.experts, b.largest_matrix) for b in counted.blocks for _ in range(b.repeats)]
    assert sorted(formula) == sorted(expanded)
    assert counted.outside_blocks == real.outside_blocks + (2 * table if table else 0)


@pytest.mark.parametrize("facts", FIRST_OF_TYPE.values(), ids=lambda facts: str(facts.model_type))
@pytest.mark.sweep(every=2)
def test_shapes_are_those_of_the_real_weights(facts: ModelFacts) -> None:
    short = builder.shortened(facts, 3)
    counts = count_parameters(short)
    formula = Counter(counts.outside)
    for block in counts.blocks:
        formula += Counter(list(block.shapes) * block.repeats)
    model = meta_model(builder.hf_config(short), short)
    assert formula == Counter(tuple(weight.shape) for weight in model.parameters())


@pytest.mark.parametrize("model_type", FIRST_OF_TYPE)
@pytest.mark.sweep(every=2)
def test_block_classes_are_what_transformers_calls_them(model_type: str) -> None:
    short = builder.shortened(FIRST_OF_TYPE[model_type], 2)
    model = meta_model(builder.hf_config(short), short)
    present = {type(part).__name__ for part in model.modules()}
    assert set(find_architecture(model_type).block_class.split(",")) <= present


@pytest.mark.parametrize(
    ("changes", "explanation"),
    [
        ({"tie_word_embeddings": False}, "a head of its own"),
        ({"num_layers": 5}, "five layers"),
        ({"num_kv_heads": 2}, "grouped queries"),
        ({"qkv_bias": True, "attn_out_bias": True}, "attention_bias sets all four"),
        ({"mlp_bias": True}, "biased MLP"),
    ],
)
def test_each_figure_of_a_decoder_is_counted(changes: dict[str, object], explanation: str) -> None:
    small = replace(
        find_model("llama-7b"), hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16,
        intermediate_size=96, vocab_size=50, tie_word_embeddings=True,
    )  # fmt: skip
    facts = replace(small, **changes)  # type: ignore[arg-type]
    model = meta_model(builder.hf_config(facts), facts)
    assert count_parameters(facts).total == real_count(model), explanation
    assert count_parameters(facts).total != count_parameters(small).total


def test_published_head_of_flan_t5_stays_untied_after_loading(tmp_path: Path) -> None:
    """The decision on flan-t5 and mT5: `from_pretrained` keeps the head that the checkpoint stores."""
    config = transformers.T5Config(
        vocab_size=100, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=4
    )
    model = transformers.T5ForConditionalGeneration(config)
    tied = real_count(model)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(100, 16))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "tie_word_embeddings": False}))
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings is True
    assert real_count(loaded) == tied + 100 * 16


def test_active_parameters_leave_out_idle_experts_only() -> None:
    mixtral = next(facts for facts in models() if facts.model_type == "mixtral")
    counts = count_parameters(mixtral)
    idle = 6 * 3 * mixtral.hidden_size * mixtral.intermediate_size * mixtral.num_layers
    assert active_parameters(mixtral, counts) == counts.total - idle
