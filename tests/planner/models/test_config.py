"""Reading a transformers config: the catalogue's facts, the class defaults, and errors that name the field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from planner.errors import BrokenFile, DsplanError, UnknownName
from planner.models.catalogue import find_model, models
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts
from planner.models.from_hf.config import CLASS_ENDINGS, facts_from_config, read_config
from planner.models.from_hf.reader import find_architecture, model_types
from strategies.tracing import to_hf as builder
from tests.planner.models.hf_modules import meta_model, real_count

OUTSIDE = {*builder.STAND_INS, *builder.NOT_IN_TRANSFORMERS}
NATIVE = [facts for facts in models() if facts.model_type not in OUTSIDE]
FIRST_OF_TYPE = {facts.model_type: facts for facts in reversed(NATIVE)}
# What a config does not say, or the catalogue words for people.
# A traced module's positions turn by its config's own base, which no row has to say.
NOT_IN_CONFIG = {"name", "family", "aliases", "dtype", "note", "remote_code", "rotary_base", "rotary_scaling"}
# BloomConfig has no length, latent attention has a head width of its own, DeBERTa's code reads a key its class lacks.
DERIVED_OTHERWISE = {
    ("bloom", "max_position_embeddings"), ("deepseek_v2", "head_dim"), ("deepseek_v3", "head_dim"),
    ("deberta-v2", "share_att_key"), ("deberta-v2", "position_buckets"),
}  # fmt: skip


def _as_json(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return values


@pytest.mark.parametrize("facts", NATIVE, ids=lambda facts: str(facts.name))
@pytest.mark.sweep(suite=lambda facts: FIRST_OF_TYPE[facts.model_type] is facts)
def test_a_config_with_the_figures_of_a_row_gives_the_facts_of_that_row(facts: ModelFacts) -> None:
    config = {**_as_json(builder.hf_config(facts)), "tie_word_embeddings": facts.tie_word_embeddings}
    read = facts_from_config(config, "config.json")
    for field in dataclasses.fields(ModelFacts):
        if field.name not in NOT_IN_CONFIG:
            assert getattr(read, field.name) == getattr(facts, field.name), field.name


@pytest.mark.parametrize("keys", [{"rope_theta": 500000.0}, {"rope_parameters": {"rope_theta": 500000.0}}])
def test_the_base_of_rotary_positions_is_read_from_either_key(keys: dict[str, Any]) -> None:
    config = _as_json(builder.hf_config(FIRST_OF_TYPE["llama"]))
    bare = {key: value for key, value in config.items() if not key.startswith("rope")}
    assert facts_from_config({**bare, **keys}, "config.json").rotary_base == 500_000
    assert facts_from_config(bare, "config.json").rotary_base == 0


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0}}, "llama3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, ""),
        ({"rope_scaling": None}, ""),
    ],
)
def test_the_scaling_of_rotary_positions_is_read_from_either_key(keys: dict[str, Any], scaling: str) -> None:
    config = _as_json(builder.hf_config(FIRST_OF_TYPE["llama"]))
    bare = {key: value for key, value in config.items() if not key.startswith("rope")}
    assert facts_from_config({**bare, **keys}, "config.json").rotary_scaling == scaling


@pytest.mark.parametrize("facts", FIRST_OF_TYPE.values(), ids=lambda facts: str(facts.model_type))
@pytest.mark.sweep(every=3)
def test_count_of_a_small_config_is_that_of_the_model_built_from_it(facts: ModelFacts) -> None:
    small = builder.shortened(facts, 2)
    config = builder.hf_config(small)
    read = facts_from_config(_as_json(config), "config.json")
    assert read.parameters == real_count(meta_model(config, dataclasses.replace(small, **_tied(small))))


def _tied(facts: ModelFacts) -> dict[str, Any]:
    return {"tie_word_embeddings": True} if facts.model_type in ("t5", "mt5") else {}


@pytest.mark.parametrize("model_type", FIRST_OF_TYPE)
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    """Among them ties and dropouts. A null stands for a figure that follows from the others."""
    entry, config = find_architecture(model_type), CONFIG_MAPPING[model_type]()
    for fact, keys in entry.read.items():
        defaulted = [key for key in keys if key in entry.defaults]
        own = [key for key in keys if hasattr(config, key)]
        if not defaulted or (model_type, fact) in DERIVED_OTHERWISE:
            continue
        actual = getattr(config, own[0]) if own else getattr(config, "rope_parameters", {}).get(defaulted[0])
        default = entry.defaults[defaulted[0]]
        assert default == actual or (default is None and actual in _follows(fact, config)), fact


def test_sequences_are_split_where_transformers_has_a_tensor_parallel_plan() -> None:
    for model_type in FIRST_OF_TYPE:
        entry, config = find_architecture(model_type), CONFIG_MAPPING[model_type]
        has_plan = any(
            getattr(part, "base_model_tp_plan", None)
            for part in (config, *(getattr(config, "sub_configs", None) or {}).values())
        )
        if entry.kind == "decoder":
            assert entry.facts.get("splits_sequences", True) == has_plan, model_type
        assert entry.facts.get("splits_sequences", True) or not has_plan, model_type


def _follows(fact: str, config: Any) -> tuple[Any, ...]:
    """Return what a figure may be in the class where the entry leaves it to the others."""
    if fact == "num_kv_heads":
        return (None, config.num_attention_heads)
    if fact == "head_dim":
        return (None, config.hidden_size // config.num_attention_heads)
    if fact == "intermediate_size":
        return (None, 4 * config.hidden_size)
    return (None, 0, config.num_hidden_layers) if fact == "decoder_layers" else (None, 0, config.hidden_size)


SWITCHES = {
    "opt": ["do_layer_norm_before", "_remove_final_layer_norm"],
    "falcon": ["multi_query", "alibi"],
    "mpt": ["expansion_ratio"],
    "gpt_bigcode": ["multi_query"],
    "qwen2": ["use_sliding_window"],
    "qwen3": ["use_sliding_window"],
    "smollm3": ["use_sliding_window"],
    "qwen2_moe": ["use_sliding_window", "decoder_sparse_step", "mlp_only_layers"],
    "qwen3_moe": ["use_sliding_window", "decoder_sparse_step", "mlp_only_layers"],
    "stablelm": ["qk_layernorm"],
    "cohere": ["use_qk_norm"],
    "t5": ["feed_forward_proj"],
    "mt5": ["feed_forward_proj"],
    "dinov2": ["mlp_ratio", "use_swiglu_ffn"],
    "deberta-v2": ["relative_attention", "position_biased_input", "pos_att_type"],
}


@pytest.mark.parametrize(("model_type", "keys"), SWITCHES.items(), ids=SWITCHES)
def test_defaults_of_switches_are_those_of_the_config_class(model_type: str, keys: list[str]) -> None:
    """Keys that no figure is read from directly, and that decide how the rest is meant."""
    defaults, config = find_architecture(model_type).defaults, CONFIG_MAPPING[model_type]()
    assert {key: defaults[key] for key in keys} == {key: getattr(config, key) for key in keys}


@pytest.mark.parametrize("model_type", ["clip_text_model", "clip_vision_model", "siglip_vision_model", "gemma3_text"])
def test_nested_defaults_are_those_of_the_config_class(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    for key, default in find_architecture(model_type).nested.items():
        assert getattr(config, key, True) == default, key


@pytest.mark.parametrize("config_class", ["CLIPConfig", "Gemma3Config"])
def test_inner_configs_may_leave_out_their_defaults(config_class: str) -> None:
    config = getattr(transformers, config_class)()
    values = {key: value for key, value in _as_json(config).items() if not key.endswith("_config")}
    built = config_class.replace("Config", "Model" if "CLIP" in config_class else "ForConditionalGeneration")
    facts = facts_from_config({**values, "architectures": [built]}, "config.json")
    assert facts.parameters == real_count(meta_model(config, facts))


HEADS = [
    "BertModel", "BertForPreTraining", "BertForSequenceClassification", "BertForTokenClassification",
    "BertForQuestionAnswering", "RobertaForSequenceClassification", "DistilBertForSequenceClassification",
    "AlbertModel", "AlbertForSequenceClassification", "ElectraForSequenceClassification", "ElectraForMaskedLM",
    "DebertaV2Model", "DebertaV2ForSequenceClassification", "ModernBertModel", "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification", "GPT2Model", "GPT2ForSequenceClassification", "LlamaModel",
    "LlamaForSequenceClassification", "OPTForSequenceClassification", "T5Model", "BartModel", "ViTModel",
    "Dinov2ForImageClassification", "WhisperModel",
]  # fmt: skip


@pytest.mark.parametrize("built", HEADS)
def test_each_head_of_an_architecture_is_counted(built: str) -> None:
    """The config's own class name decides which head there is; three labels."""
    config_class = getattr(transformers, built).config_class
    row = builder.shortened(FIRST_OF_TYPE[config_class.model_type], 2)
    config = builder.hf_config(row)
    config.architectures, config.num_labels = [built], 3
    facts = facts_from_config(_as_json(config), "config.json")
    assert facts.parameters == real_count(meta_model(config, facts))


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": None},
        {"head_dim": 32},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
    ],
)
def test_a_sparse_llama_config_means_what_transformers_makes_of_it(changes: Mapping[str, Any]) -> None:
    values = {**LLAMA, **changes}
    facts = facts_from_config(values, "config.json")
    config = transformers.LlamaConfig(**{key: value for key, value in values.items() if key != "model_type"})
    assert facts.parameters == real_count(meta_model(config, facts))


def test_older_spellings_are_read() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_ctx": 1024, "vocab_size": 50257}
    assert facts_from_config(gpt2, "config.json").parameters == find_model("gpt2").parameters
    neox = {**LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.5}
    assert facts_from_config(neox, "config.json").rotary_pct == 0.5


def test_a_published_flan_t5_config_counts_the_stored_head() -> None:
    flan = find_model("flan-t5-small")
    config = {**_as_json(builder.hf_config(flan)), "tie_word_embeddings": False}
    assert facts_from_config(config, "config.json").parameters == flan.parameters == 76961152


@pytest.mark.parametrize(
    ("sparse", "dense_layers"), [({}, 0), ({"mlp_only_layers": [0, 1]}, 2), ({"decoder_sparse_step": 2}, 2)]
)
def test_dense_layers_of_a_qwen_mixture_are_counted(sparse: Mapping[str, Any], dense_layers: int) -> None:
    facts = builder.shortened(find_model("qwen3-30b-a3b"), 4)
    config = builder.hf_config(facts)
    for key, value in sparse.items():
        setattr(config, key, value)
    read = facts_from_config(_as_json(config), "config.json")
    assert read.first_k_dense == dense_layers
    assert read.parameters == real_count(meta_model(config, read))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": None}, "my.json: has no field 'model_type'; add it"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "my.json: has no field 'hidden_size'; "),
        ({**LLAMA, "num_hidden_layers": "two"}, "field 'num_hidden_layers' is 'two'; write a whole number from 1 to"),
        ({**LLAMA, "num_hidden_layers": 0}, "field 'num_hidden_layers' is 0; write a whole number from 1 to 1,000"),
        ({**LLAMA, "vocab_size": True}, "field 'vocab_size' is True; write a whole number"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "field 'tie_word_embeddings' is 'no'; write true or false"),
        ({**LLAMA, "attention_dropout": -1}, "field 'attention_dropout' is -1; write a number from 0 to 1,000,000"),
        ({**LLAMA, "num_attention_heads": 5}, "64 is no multiple of its 5 attention heads"),
        ({**LLAMA, "architectures": ["LlamaForQuestionAnswering"]}, "'LlamaForQuestionAnswering' is none of"),
        ({**LLAMA, "architectures": "Llama"}, "field 'architectures' is 'Llama'"),
        ({"model_type": "clip", "text_config": 3}, "field 'text_config' is 3, not an object"),
        ({**LLAMA, "model_type": "albert", "num_hidden_groups": 2}, "'num_hidden_groups' is 2; only 1 is counted"),
        ({**LLAMA, "model_type": "deberta-v2"}, "field 'relative_attention' is False; only True is counted"),
        ({**LLAMA, "model_type": "deepseek_v3"}, "my.json: has no field 'n_routed_experts'"),
    ],
)
def test_a_broken_config_names_file_field_and_remedy(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(BrokenFile) as caught:
        facts_from_config(config, "my.json")
    assert message in str(caught.value)
    assert "my.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_type_offers_near_ones_and_the_factory() -> None:
    with pytest.raises(UnknownName, match=r"unknown model_type 'lama'; nearest: llama.*package\.module:factory"):
        facts_from_config({**LLAMA, "model_type": "lama"}, "config.json")


@pytest.mark.parametrize("key", list(LLAMA))
def test_every_required_field_is_asked_for(key: str) -> None:
    with pytest.raises(DsplanError, match=f"has no field '{key}'"):
        facts_from_config({name: value for name, value in LLAMA.items() if name != key}, "config.json")


def test_a_directory_or_file_is_read_and_named(tmp_path: Path) -> None:
    directory = tmp_path / "my-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "small.json").write_text(json.dumps(LLAMA))
    assert read_config(directory).name == "my-llama"
    assert read_config(directory / "config.json").name == "my-llama"
    assert read_config(tmp_path / "small.json").name == "small"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "llama",', "is not JSON (line 1 column"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"\xff\xfe\x00bad", "is not text in UTF-8"),
        (b"", "is not JSON"),
    ],
)
def test_a_file_that_is_no_config_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BrokenFile) as caught:
        read_config(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match=r"holds no config\.json; name a directory that `save_pretrained` wrote"):
        read_config(tmp_path)


def test_every_kind_has_class_names_and_every_type_a_known_kind() -> None:
    assert {find_architecture(name).kind for name in model_types()} <= set(CLASS_ENDINGS)
    assert {count_parameters(facts).total > 0 for facts in models()} == {True}
