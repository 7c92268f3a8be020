"""`--model` and `--model-size`: files, factories, names and sizes, and one sentence for everything else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dsplan.exact.factory import any_model
from hardware_db.units import parse_count
from planner.errors import ContradictoryRequest, DsplanError
from planner.models.counting.count import count_parameters
from planner.models.resolve import model_of_size
from planner.models.tasks import default_sequence_length, default_task
from strategies.tracing import to_hf as builder
from tests.planner.models.hf_modules import meta_model, real_count

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
FACTORIES = """
import torch, transformers
from torch import nn

class Zoo:
    @staticmethod
    def tiny():
        return nn.Linear(3, 4)

def config():
    return transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)

def mapping():
    return {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 100}

def huge():
    return nn.Sequential(*(nn.Linear(10**5, 10**5, bias=False) for _ in range(10)))

def needs(size):
    return nn.Linear(size, size)

def fails():
    raise RuntimeError("no such\\nweights")

def nothing():
    return None

number = 3
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's files and a module of factories."""
    (tmp_path / "my-llama").mkdir()
    (tmp_path / "my-llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "broken_factories.py").write_text("import not_a_module_at_all\n")
    (tmp_path / "invalid_factories.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    for module in ("factories", "broken_factories", "invalid_factories"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["my-llama", "my-llama/config.json", "./my-llama"])
def test_files_come_first(directory: Path, name: str) -> None:
    assert any_model(name).name == "my-llama"


def test_a_directory_named_like_a_model_but_without_config_does_not_hide_it(directory: Path) -> None:
    (directory / "gpt2").mkdir()
    assert any_model("gpt2").name == "openai-community/gpt2"
    (directory / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    assert any_model("gpt2").hidden_size == 64


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("factories:Zoo.tiny", 16),
        ("factories:huge", 10 * 10**10),
        ("factories:mapping", 95040),
    ],
)
def test_factories_are_called_on_the_meta_device(directory: Path, name: str, parameters: int) -> None:
    assert any_model(name).parameters == parameters


def test_a_factory_may_return_a_transformers_config(directory: Path) -> None:
    facts = any_model("factories:config")
    assert (facts.model_type, facts.hidden_size, facts.name) == ("llama", 64, "factories:config")


def test_a_size_stands_for_a_generic_decoder() -> None:
    assert any_model("6.7B") == any_model(None, model_size="6.7B")
    assert any_model("6.7b").name == "generic-6.7B"


BAD_NAMES = [
    ("empty", "holds no config.json"),
    ("notes.txt", "notes.txt: this is no config.json"),
    ("missing/config.json", "does not exist"),
    ("opt-6.8b", "nearest: opt-6.7b"),
    ("./no-such-thing", "unknown model 'no-such-thing'"),
    ("x" * 5000, "unknown model"),
    ("factories:nowhere", "unknown factory 'factories:nowhere'"),
    ("factories:Zoo.tinny", "nearest: factories:Zoo.tiny"),
    ("no_such_module:model", "there is no module 'no_such_module'; run from the directory that holds it"),
    ("broken_factories:model", "there is no module 'not_a_module_at_all'; install not_a_module_at_all"),
    ("invalid_factories:f", "importing invalid_factories raised SyntaxError"),
    ("factories:fails", "the factory raised RuntimeError: no such weights"),
    ("factories:needs", "missing 1 required positional argument: 'size'; it is called without arguments"),
    ("factories:nothing", "the factory returned a NoneType; return an nn.Module"),
    ("factories:number", "number is of type int; name a function"),
    ("  ", "no model is named"),
]


@pytest.mark.parametrize(("name", "message"), BAD_NAMES, ids=[name[:30] for name, _ in BAD_NAMES])
def test_bad_names_are_one_sentence(directory: Path, name: str, message: str) -> None:
    with pytest.raises(DsplanError) as caught:
        any_model(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_working_directory_does_not_stay_on_the_path(directory: Path) -> None:
    before = list(sys.path)
    any_model("factories:Zoo.tiny")
    assert sys.path == before


def test_name_and_size_exclude_each_other() -> None:
    with pytest.raises(ContradictoryRequest, match="both given; drop one"):
        any_model("gpt2", model_size="7B")
    with pytest.raises(DsplanError, match="no model is named"):
        any_model(None)


def test_a_factory_without_torch_may_return_a_dict(directory: Path) -> None:
    (directory / "plain.py").write_text("def model():\n    return " + repr(LLAMA) + "\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dsplan.exact.factory import any_model\n"
        "print(any_model('plain:model').parameters)\n"
        "try:\n    any_model('factories:Zoo.tiny')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = {"PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    count, error = out.stdout.splitlines()
    assert count == "95040"
    assert error.startswith("DsplanError")
    assert "pip install 'dsplan[train]'" in error


@pytest.mark.parametrize("size", ["1M", "20M", "125M", "350M", "1.3B", "6.7B", "13B", "70B", "175B", "1T", "10T"])
def test_a_generic_decoder_has_the_size_asked_for(size: str) -> None:
    facts = model_of_size(size)
    assert facts.parameters == count_parameters(facts).total
    assert abs(facts.parameters / parse_count(size) - 1) <= 0.005


def test_any_size_is_met_with_a_sensible_shape() -> None:
    chance = random.Random(0)
    for _ in range(300):
        parameters = int(10 ** chance.uniform(6, 13))
        facts = model_of_size(str(parameters))
        assert abs(facts.parameters / parameters - 1) <= 0.005
        assert 2 <= facts.intermediate_size / facts.hidden_size <= 4
        assert facts.num_heads * facts.head_dim == facts.hidden_size
        if parameters >= 5 * 10**9:
            assert facts.num_heads % 8 == 0


def test_a_generic_decoder_is_what_transformers_builds() -> None:
    facts = model_of_size("125M")
    assert facts.parameters == real_count(meta_model(builder.hf_config(facts), facts))
    assert (model_of_size("13B").hidden_size, model_of_size("13B").num_layers) == (5120, 40)


@pytest.mark.parametrize("size", ["0", "-3B", "999K", "11T", "seven", "7Q", "1e9", ""])
def test_impossible_sizes_are_one_sentence(size: str) -> None:
    with pytest.raises(DsplanError) as caught:
        any_model(None, model_size=size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "task", "length"),
    [
        ("opt-6.7b", "causal-lm", 2048),
        ("gpt2", "causal-lm", 1024),
        ("llama-3-8b", "causal-lm", 2048),
        ("bert-large", "masked-lm", 512),
        ("roberta-base", "masked-lm", 512),
        ("t5-3b", "seq2seq", 512),
        ("whisper-tiny", "seq2seq", 448),
        ("google/vit-base-patch16-224", "image-cls", 197),
    ],
)
def test_each_kind_has_its_usual_task_and_length(name: str, task: str, length: int) -> None:
    facts = any_model(name)
    assert (default_task(facts), default_sequence_length(facts)) == (task, length)


def test_a_classifier_is_planned_as_one(directory: Path) -> None:
    (directory / "bert.json").write_text(
        json.dumps({**LLAMA, "model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    )
    assert default_task(any_model("bert.json")) == "seq-cls"
