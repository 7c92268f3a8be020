"""The catalogue: every row is read strictly, found by any of its names, and quick to find."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from planner.errors import BrokenFile, DsplanError, UnknownName
from planner.models import catalogue, compile
from planner.models.catalogue import find_model, models
from planner.models.from_hf import reader

ROWS = yaml.load(
    (compile.HERE / "catalogue.yaml").read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)["models"]
EXPECTED = {
    "opt-125m": "facebook/opt-125m",
    "opt-6.7b": "facebook/opt-6.7b",
    "OPT-6.7B": "facebook/opt-6.7b",
    "facebook/opt-6.7b": "facebook/opt-6.7b",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-7b": "huggyllama/llama-7b",
    "bert-large": "google-bert/bert-large-uncased",
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "t5-3b": "google-t5/t5-3b",
    "t5-small": "google-t5/t5-small",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "gpt2": "openai-community/gpt2",
    "mirror-of-it/opt_125m": "facebook/opt-125m",
}


@pytest.mark.parametrize(("name", "model"), EXPECTED.items())
def test_people_find_models_by_the_names_they_use(name: str, model: str) -> None:
    assert find_model(name).name == model


def test_all_280_models_answer_to_their_815_names() -> None:
    names = [(spelling, row["id"]) for row in ROWS for spelling in (row["id"], *row["aliases"])]
    assert (len(ROWS), len(names)) == (280, 815)
    assert [spelling for spelling, row in names if find_model(spelling).name != row] == []
    assert [row["id"] for row in ROWS if find_model(row["id"].rpartition("/")[2]).name != row["id"]] == []


def test_every_figure_of_a_row_reaches_the_facts() -> None:
    parts = ("mla", "text", "vision")
    for row in ROWS:
        facts = find_model(row["id"])
        for key, value in row.items():
            if key in compile.BOOKKEEPING or key in ("id", *parts) or value is None:
                continue
            stored = getattr(facts, key)
            assert (list(stored) if key == "aliases" else stored) == value, f"{row['id']} {key}"
        for key in parts:
            for name, value in (row.get(key) or {}).items():
                assert getattr(getattr(facts, key), name) == value, f"{row['id']} {key}.{name}"


def test_every_row_cites_a_source() -> None:
    assert [row["id"] for row in ROWS if not all(isinstance(cited, str) and cited for cited in row["source"])] == []


def test_compiled_files_are_fresh() -> None:
    assert catalogue.COMPILED.read_text(encoding="utf-8") == compile.compile_catalogue()
    assert reader.COMPILED.read_text(encoding="utf-8") == compile.compile_architectures()


def test_unknown_name_offers_the_nearest() -> None:
    line = r"unknown model 'facebook/opt-6\.8b'; nearest: opt-6\.7b, .*dsplan models"
    with pytest.raises(UnknownName, match=line) as caught:
        find_model("facebook/opt-6.8b")
    assert "\n" not in str(caught.value)


def test_models_are_in_the_order_of_the_file() -> None:
    assert [facts.name for facts in models()] == [row["id"] for row in ROWS]


def test_finding_one_model_reads_one_compiled_file_once_and_builds_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, rows = Mock(wraps=catalogue.read_compiled), Mock(wraps=catalogue._build)
    monkeypatch.setattr(catalogue, "read_compiled", reads)
    monkeypatch.setattr(catalogue, "_build", rows)
    catalogue._table.cache_clear()
    for _ in range(2):
        find_model("opt-6.7b")
    reads.assert_called_once_with(catalogue.COMPILED)
    assert rows.call_count == 2


GOOD_ROW = """
- id: somebody/model
  aliases: []
  family: gpt2
  model_type: gpt2
  architecture: GPT2LMHeadModel
  kind: decoder
  hidden_size: 8
  num_layers: 1
  num_heads: 1
  num_kv_heads: 1
  head_dim: 8
  intermediate_size: 32
  vocab_size: 10
  source: [recalled]
"""


def _compile(tmp_path: Path, rows: str) -> str:
    path = tmp_path / "catalogue.yaml"
    path.write_text("models:" + rows, encoding="utf-8")
    return compile.compile_catalogue(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  num_heads: 1\n", "", "lacks 'num_heads'"),
        ("num_heads: 1", "num_heds: 1", "unknown key 'num_heds'"),
        ("num_heads: 1", "num_heads: one", "key 'num_heads' is 'one'"),
        ("  source: [recalled]\n", "", "has no source"),
        ("model_type: gpt2", "model_type: gpt9", "has model_type 'gpt9'"),
        ("vocab_size: 10", "vision: {hiden_size: 3}", "key 'vision'.*'hiden_size'"),
    ],
)
def test_a_broken_row_is_named_with_its_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert '"somebody/model"' in _compile(tmp_path, GOOD_ROW)
    with pytest.raises(BrokenFile, match=message):
        _compile(tmp_path, GOOD_ROW.replace(old, new))


def test_two_rows_cannot_share_a_name(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="both answer to"):
        _compile(tmp_path, GOOD_ROW + GOOD_ROW.replace("somebody", "another"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt2: {kind: decoder, block_clas: GPT2Block}", "unknown key 'block_clas'"),
        ("gpt2: {kind: decoder, facts: {gated: true}}", "unknown key 'gated'"),
        ("gpt2: {extends: gpt3}", "extends unknown 'gpt3'"),
    ],
)
def test_a_broken_architecture_entry_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "architectures.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BrokenFile, match=message):
        compile.compile_architectures(path)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
        ("Llama-3.1-405B-Instruct-FP8", "meta-llama/Llama-3.1-405B"),
        ("llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("gemma-2-9b-it", "google/gemma-2-9b"),
        ("deepseek-v3-base", "deepseek-ai/DeepSeek-V3"),
        ("mixtral-8x7b-instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
    ],
)
def test_words_for_a_training_or_a_storage_do_not_count(name: str, model: str) -> None:
    assert find_model(name).name == model


@pytest.mark.parametrize(
    ("name", "members", "strangers"),
    [
        ("llama3", ("llama3-8b", "llama3-70b", "llama3.1-405b"), ("llama-30b", "llama2-7b")),
        ("llama-70b", ("llama2-70b", "llama3-70b"), ("llama2-7b",)),
        ("qwen3", ("qwen3-8b", "qwen3-32b"), ("qwen2.5-3b",)),
        ("bert", ("bert-base", "bert-large"), ("distilbert",)),
    ],
)
def test_a_family_names_its_models_and_no_others(name: str, members: Sequence[str], strangers: Sequence[str]) -> None:
    with pytest.raises(DsplanError, match=f"'{name}' is the name of several models") as caught:
        find_model(name)
    offered = str(caught.value).partition(": ")[2].partition(";")[0].split(", ")
    assert set(members) <= set(offered)
    assert not set(strangers) & set(offered)


def test_a_stranger_of_the_hub_is_told_what_to_pass() -> None:
    with pytest.raises(UnknownName, match=r"'acme/foo-7b'.*the Hub was not asked.*config\.json.*--model-size 7B$"):
        find_model("acme/foo-7b")
