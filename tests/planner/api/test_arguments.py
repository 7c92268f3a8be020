"""HardwareSelector reads its own arguments: hardware, families, counts, other task types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsplan import DsplanError, HardwareSelector
from dsplan.selector import MODEL_FAMILIES


def selector(**settings: Any) -> HardwareSelector:
    return HardwareSelector(gpu="H100-SXM5-80GB", **settings)


def test_settings_of_the_selector_reach_the_plan() -> None:
    config = selector(precision="fp32", optimizer="sgd", sequence_length=256).get_distributed_training_config(
        None, "facebook/opt-125m", gpu_count=2
    )
    assert config["precision"] == "fp32"
    assert config["mixed_precision"] is False
    assert config["optimizer"] == "sgd"
    assert config["sequence_length"] == 256
    assert config["global_batch_size"] == 2 * 8
    assert config["hardware"] == "H100-SXM5-80GB"


def test_without_distributed_one_gpu_is_planned_for() -> None:
    result = selector().select_hardware_for_task("text_generation", "facebook/opt-125m", distributed=False)
    assert (result["gpu_count"], result["distributed_strategy"], result["strategy"]) == (1, "DDP", "single")


def test_a_machine_type_fills_its_node() -> None:
    config = HardwareSelector(node_type="p4d.24xlarge").get_distributed_training_config(None, "facebook/opt-6.7b")
    assert config["gpu_count"] == 8
    assert config["hardware"] == "A100-SXM4-40GB"


def test_what_was_taken_for_granted_is_said() -> None:
    config = selector().get_distributed_training_config(None, "facebook/opt-125m", gpu_count=2)
    assert "sequence length 2048" in config["assumed"]
    assert "precision bf16" in config["assumed"]


FAMILY_MODELS = {
    "text_generation": ("facebook/opt-125m", "causal-lm"),
    "text_classification": ("bert-base-uncased", "seq-cls"),
    "embedding": ("bert-base-uncased", "masked-lm"),
    "text_to_text": ("t5-small", "seq2seq"),
    "vision": ("google/vit-base-patch16-224", "image-cls"),
    "audio": ("openai/whisper-small", "seq2seq"),
    "multimodal": ("openai/clip-vit-base-patch32", "image-cls"),
}


def test_the_families_are_these() -> None:
    assert set(MODEL_FAMILIES) == set(FAMILY_MODELS)


@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_each_family_plans_a_model_of_its_own(family: str) -> None:
    model, task = FAMILY_MODELS[family]
    config = selector().get_distributed_training_config(family, model, gpu_count=4)
    assert config["global_batch_size"] == 32
    assert config.plan.workload["task"] == task


def configured(**arguments: Any) -> Callable[[], object]:
    return lambda: selector().get_distributed_training_config(**{"model_name": "facebook/opt-125m", **arguments})


def selected(**arguments: Any) -> Callable[[], object]:
    return lambda: selector().select_hardware_for_task(**{"model_name": "facebook/opt-125m", **arguments})


REFUSED = [
    (configured(model_family="text_generaton"), "nearest: text_generation"),
    (configured(model_family="vision"), "opt-125m is a decoder model, not of family vision; use text_generation"),
    (configured(model_family=None, model_name="facebook/opt-126m"), "nearest: "),
    (configured(model_family=None, gpu_count=0), " is named; drop one of the two"),
    (configured(model_family=None, batch_size=-1), "batch_size is -1"),
    (configured(model_family=None, batch_size=2.5), "batch_size is 2.5"),
    (configured(model_family=None, max_memory_gb=0), "--max-memory-gb is 0; give a number from 0.001 to 1,000,000"),
    (configured(model_family=None, max_memory_gb=float("nan")), "--max-memory-gb is nan; give a number"),
    (configured(model_family=None, gpu_count=-1), "gpu_count is -1; it must be a whole number of at least 0, or None"),
    (selected(model_family=None, task_type="serving"), "task_type 'serving' cannot be planned for; use 'training' or"),
    (selected(model_family=None, distributed=False, gpu_count=4), "gpu_count is 4 but distributed is False"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_bad_input_is_one_line(call: Callable[[], object], words: str) -> None:
    with pytest.raises(DsplanError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
