"""The sections and keys of a config: DeepSpeed's sections and ours, flat ones, and keys that nobody knows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hardware_db.errors import DsplanError
from planner.question_defaults import LORA_RANK
from strategies.config import limits
from strategies.config.known import TOP, Keys
from strategies.config.limits import refuse_deepspeed_keys
from strategies.config.names import DEEPSPEEDS_OWN, OPTIMIZERS, SCHEDULERS, plain
from strategies.config.read import read_config
from strategies.config.values import (
    ActivationSection,
    CheckpointSection,
    CommunicationSection,
    CsvSection,
    Fp16Section,
    NamedParts,
    ProfilerSection,
    ScriptConfig,
    TensorboardSection,
    ZeroSection,
)
from strategies.modules.adapters import read_method
from strategies.modules.precision import ScaleSettings, read_scale_settings
from strategies.optim.registry import OF_OPTIMIZERS, OF_SCHEDULERS
from tests.strategies.training_bodies import Recipe

FULL = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1000},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "wall_clock_breakdown": False,
}
"""A file such as people bring from DeepSpeed."""

FLAT = {
    "batch_size": 32,
    "learning_rate": 1e-4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_stage": 3,
    "offload_optimizer": True,
    "offload_param": {"device": "cpu", "pin_memory": False},
    "fp16": True,
    "loss_scale": None,
    "activation_checkpointing": True,
    "save_dir": "./checkpoints",
    "save_interval": 500,
    "keep_checkpoints": 5,
    "log_interval": 20,
    "save_logs": True,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "profiling": False,
}


def without_values(config: Mapping[str, Any]) -> ScriptConfig:
    """The config read, but for what DeepSpeed gets of it."""
    read = read_config(config)
    return ScriptConfig(**{name: getattr(read, name) for name in ScriptConfig.__slots__ if name != "values"})


def refusal(config: Mapping[str, Any]) -> str:
    with pytest.raises(DsplanError) as caught:
        read_config(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_deepspeed_file_is_understood_whole() -> None:
    assert without_values(FULL) == ScriptConfig(
        train_batch_size=32,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        precision="fp16",
        optimizer=NamedParts(name="AdamW", params=FULL["optimizer"]["params"]),  # type: ignore[index]
        scheduler=NamedParts(name="WarmupLR", params=FULL["scheduler"]["params"]),  # type: ignore[index]
        fp16=Fp16Section(loss_scale_window=1000, hysteresis=2, min_loss_scale=1.0),
        zero=ZeroSection(stage=2, reduce_bucket_size=200_000_000, offload="none"),
    )


def test_flat_keys_mean_what_the_sections_mean() -> None:
    assert without_values(FLAT) == ScriptConfig(
        micro_batch_size=32,
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        precision="fp16",
        optimizer=NamedParts(name="AdamW", params={"lr": 1e-4}),
        zero=ZeroSection(stage=3, offload="all"),
        activations=ActivationSection(policy="full"),
        csv_monitor=CsvSection(enabled=True),
        checkpoint=CheckpointSection(directory="./checkpoints", keep_last=5, every_steps=500),
        steps_per_print=10,
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        (dict.fromkeys(("train_batch_size", "gradient_clipping", "fp16", "optimizer"), None), {}),
        ({"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}}, {}),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"precision": "bf16-pure"},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 8, "min_loss_scale": 0.5}},
            {"precision": "fp16", "fp16": Fp16Section(loss_scale=128.0, initial_scale_power=8, min_loss_scale=0.5)},
        ),
        ({"fp16": True, "loss_scale": 64}, {"precision": "fp16", "fp16": Fp16Section(loss_scale=64.0)}),
        (
            {"optimizer": {"type": "SGD"}, "learning_rate": 0.1},
            {"optimizer": NamedParts(name="SGD", params={"lr": 0.1})},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": 1e-6}}},
            {"optimizer": NamedParts(name="Adam", params={"eps": 1e-6})},
        ),
        (
            {"zero_optimization": {"stage": 3, "param_persistence_threshold": 1e6, "model_persistence_threshold": 1e6}},
            {"zero": ZeroSection(stage=3, param_persistence_threshold=1_000_000)},
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": False}}},
            {"zero": ZeroSection(offload="optimizer", offload_ratio=0.3, pin_memory=False)},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 6, "fast_init": True},
                    "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1e9},
                }
            },
            {"zero": ZeroSection(stage=3, offload="nvme", nvme_path="/nvme", buffer_count=6)},
        ),
        (
            {
                "zero_optimization": {
                    "cpu_offload": True,
                    "cpu_offload_params": True,
                    "cpu_offload_use_pin_memory": False,
                }
            },
            {"zero": ZeroSection(offload="all", pin_memory=False)},
        ),
        ({"zero_optimization": True}, {"zero": ZeroSection(stage=1)}),
        ({"zero_optimization": False}, {"zero": ZeroSection(stage=0)}),
        (
            {"communication": {"overlap_comm": True, "bucket_cap_mb": 12.5, "overlap_reduce_scatter": True}},
            {"communication": CommunicationSection(bucket_mib=12.5)},
        ),
        ({"communication_data_type": "fp32"}, {"communication": CommunicationSection(data_type="fp32")}),
        (
            {"communication": {"data_type": "bf16", "compression": "int8", "error_feedback": False, "block_size": 64}},
            {
                "communication": CommunicationSection(
                    data_type="bf16", compression="int8", error_feedback=False, block_size=64
                )
            },
        ),
        (
            {
                "compression": {
                    "enabled": True,
                    "compression_type": "fp16",
                    "quantization_type": "asymmetric_quantization_signed",
                    "quantization_bits": 8,
                    "error_feedback": True,
                    "all_gather_fp16": True,
                }
            },
            {"communication": CommunicationSection(compression="fp16")},
        ),
        (
            {"compression": {"enabled": True, "compression_type": "quantization", "quantization_bits": 8}},
            {"communication": CommunicationSection(compression="int8")},
        ),
        ({"compression": {"enabled": False, "compression_type": "fp16"}}, {}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"accumulate_dtype": "fp32"}),
        ({"activation_checkpointing": {"enabled": False}}, {"activations": ActivationSection(policy="none")}),
        (
            {"activation_checkpointing": {"enabled": True, "partition_activations": True, "cpu_checkpointing": True}},
            {"activations": ActivationSection(policy="full", cpu_checkpointing=True)},
        ),
        (
            {"activation_checkpointing": {"policy": "selective"}},
            {"activations": ActivationSection(policy="selective")},
        ),
        (
            {
                "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "a"},
                "csv_monitor": {"output_path": ""},
            },
            {"tensorboard": TensorboardSection(enabled=True, output_path="logs", job_name="a")},
        ),
        (
            {
                "profiling": {
                    "enabled": True,
                    "profile_step": 5,
                    "module_depth": -1,
                    "top_modules": 1,
                    "output_path": "p",
                }
            },
            {"profiler": ProfilerSection(enabled=True, wait=3, warmup=1, active=1, output_path="p")},
        ),
        (
            {"profiler": {"enabled": True, "wait": 0, "warmup": 2, "active": 4}},
            {"profiler": ProfilerSection(enabled=True, wait=0, warmup=2, active=4)},
        ),
        (
            {"checkpoint": {"keep_last": 3, "asynchronous": True, "tag_validation": "Warn"}},
            {"checkpoint": CheckpointSection(keep_last=3, asynchronous=True)},
        ),
    ],
)
def test_sections(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert without_values(config) == ScriptConfig(**expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batchsize": 4}, "train_batchsize is not known; did you mean train_batch_size?"),
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag is not known; did you mean stage?"),
        ({"fp16": {"enabled": True, "loss_scal": 1}}, "fp16.loss_scal is not known; did you mean loss_scale?"),
        (
            {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
            "zero_optimization.offload_optimizer.devic is not known; did you mean device?",
        ),
        ({"stage": 2}, "stage is not known; it belongs in zero_optimization"),
        ({"loss_scale_window": 9}, "loss_scale_window is not known; it belongs in fp16"),
        ({"Optimizer": {}}, "Optimizer is not known; did you mean optimizer?"),
        ({"hue": 1}, "hue is not known; docs/reference/config.md lists the keys"),
        ({"scheduler": {"name": "WarmupLR"}}, "scheduler.name is not known"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has no type"),
        ({"compression": {"enabled": True, "bits": 8}}, "communication.bits is not known"),
        ({"profiling": {"enabled": True, "steps": 8}}, "profiler.steps is not known"),
        ({"wandb": True}, "wandb is True; it must be an object"),
        (
            {"batch_size": 2, "train_micro_batch_size_per_gpu": 4},
            "batch_size is 2 and train_micro_batch_size_per_gpu is 4",
        ),
        (
            {"compression": {"enabled": True, "compression_type": "int4"}},
            "compression_type is 'int4'; it must be one of fp16",
        ),
        (
            {"compression": {"enabled": True, "compression_type": "int8", "quantization_bits": 4}},
            "quantization_bits is 4; it must be 8",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "must both be true or both be false"),
        ({"zero_optimization": {"cpu_offload": "yes"}}, "cpu_offload is 'yes'; it must be true or false"),
        ({"zero_optimization": {"offload_optimizer": {"device": "tpu"}}}, "must be one of none, cpu, nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path is missing; name a directory"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "while the optimizer stays on the GPU"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}, "ratio is 1.5; it must be a number from 0 to 1"),
        ({"communication_data_type": "fp8"}, "communication_data_type is 'fp8'; it must be one of fp32, bf16, fp16"),
        ({"wall_clock_breakdown": "no"}, "wall_clock_breakdown is 'no'; it must be true or false"),
        ({"fp16": {"initial_scale_power": 1.5}}, "initial_scale_power is 1.5; it must be a whole number of at least 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan; it must be a number of at least 0"),
        ({"pipeline": {"partition": "even"}}, "pipeline.partition is 'even'; it must be one of uniform, parameters"),
        ({"zero_optimization": True, "zero_stage": 2}, "zero_stage is 2 and zero_optimization.stage is 1"),
        ({"communication": {"overlap_comm": 1}}, "communication.overlap_comm is 1; it must be true or false"),
        ({"communication": {"bucket_cap_mb": 0}}, "communication.bucket_cap_mb is 0; it must be a number above 0"),
        (
            {"communication": {"bucket_cap_mb": 25}, "reduce_scatter_base_size": 10},
            "communication.bucket_cap_mb and zero_optimization.reduce_bucket_size are both set",
        ),
        ({"steps_per_print": 0}, "steps_per_print is 0; it must be a whole number of at least 1"),
    ],
)
def test_configs_that_are_not_understood(config: Mapping[str, Any], words: str) -> None:
    assert words in refusal(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"wandb": {"enabled": False}, "flops_profiler": {"enabled": False, "profile_step": 1}}, ""),
        ({"prescale_gradients": False, "gradient_predivide_factor": 1.0, "elasticity": {}}, ""),
        (
            {
                "zero_optimization": {
                    "zero_quantized_weights": False,
                    "sub_group_size": 1e9,
                    "zero_hpz_partition_size": 1,
                }
            },
            "",
        ),
        ({"pipeline": {"stages": "auto", "partition": "best"}, "sparse_gradients": True, "aio": {"block_size": 1}}, ""),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size"),
        ({"fp16": {"consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training"),
    ],
)
def test_what_only_deepspeed_does(config: Mapping[str, Any], named: str) -> None:
    read = read_config(config)
    refuse_deepspeed_keys(read, Recipe(strategy="zero2").plan().configuration)
    for recipe in (Recipe(strategy="ddp"), Recipe(strategy="zero2", backend="native")):
        if not named:
            refuse_deepspeed_keys(read, recipe.plan().configuration)
            continue
        with pytest.raises(DsplanError, match=rf"cannot do what {named} asks; leave it out"):
            refuse_deepspeed_keys(read, recipe.plan().configuration)


def test_deepspeed_gets_what_it_knows() -> None:
    values = read_config({**FULL, "communication": {"compression": "bf16"}, "csv_monitor": {"enabled": True}}).values
    assert values.keys() == FULL.keys() - {"scheduler", "wall_clock_breakdown"} | {"communication_data_type"}
    assert values["communication_data_type"] == "bf16"
    assert values["optimizer"] == FULL["optimizer"]
    assert values["zero_optimization"]["offload_optimizer"] == {"device": "none"}
    flat = read_config(FLAT).values
    assert flat["train_micro_batch_size_per_gpu"] == 32
    assert flat["fp16"] == {"enabled": True}
    assert flat["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    assert {"checkpoint", "activation_checkpointing", "profiler"}.isdisjoint(flat)


def names_of(model: Any) -> set[str]:
    """The fields of one of DeepSpeed's pydantic models, by either name."""
    return {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}


def test_every_key_of_deepspeeds_own_models_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    zero = TOP.sections["zero_optimization"]
    # These are turned into others before the keys are looked at; DeepSpeed refuses the second kind itself.
    renamed = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}
    unprefixed = {name for name in names_of(DeepSpeedZeroConfig) if f"stage3_{name}" in names_of(DeepSpeedZeroConfig)}
    for name in unprefixed:
        assert read_config({"zero_optimization": {name: 1}}).values == {"zero_optimization": {f"stage3_{name}": 1}}
    pairs: list[tuple[Keys, Any]] = [
        (zero, DeepSpeedZeroConfig),
        (zero.sections["offload_optimizer"], DeepSpeedZeroOffloadOptimizerConfig),
        (zero.sections["offload_param"], DeepSpeedZeroOffloadParamConfig),
        (TOP.sections["fp16"], DeepSpeedFP16Config),
        (TOP.sections["bf16"], DeepSpeedBF16Config),
        (TOP, DeepSpeedMonitorConfig),
    ]
    assert {name for keys, model in pairs for name in names_of(model) - set(keys.names)} - renamed == unprefixed


@pytest.mark.parametrize(
    ("config", "own", "name"),
    [
        ({}, None, "adamw"),
        ({"optimizer": {"type": "Adam"}}, None, "adamw"),
        ({"optimizer": {"type": "AdamW", "params": {"fused": True}}}, None, "adamw-fused"),
        ({"optimizer": {"type": "AdamW", "params": {"foreach": False}}}, None, "adamw-forloop"),
        ({"optimizer": {"type": "adamw_8bit"}}, None, "adamw-8bit"),
        ({"optimizer": {"type": "Lion"}}, None, "lion"),
        ({"optimizer": {"type": "Muon"}}, None, "adamw"),
        ({"optimizer": {"type": "Lion"}}, torch.optim.SGD, "sgd"),
    ],
)
def test_the_plan_counts_the_optimizer_that_the_config_names(config: Mapping[str, Any], own: object, name: str) -> None:
    assert limits.name_optimizer(own, read_config(config).optimizer) == name


def test_the_plan_offloads_what_the_config_offloads() -> None:
    def limited(section: Mapping[str, Any], strategy: Any, backend: Any = "native") -> dict[str, Any]:
        return limits.limit_offload(read_config({"zero_optimization": section}).zero, strategy, backend)

    on_cpu = {"device": "cpu", "ratio": 0.5}
    assert limited({"stage": 2}, "zero2") == {"offload": None}
    assert limited({"cpu_offload": False}, "zero2") == {"offload": "none"}
    assert limited({"offload_optimizer": on_cpu}, "zero2") == {"offload": "optimizer", "offload_ratio": 0.5}
    both = {"offload_optimizer": on_cpu, "offload_param": {"device": "cpu"}}
    assert limited(both, None)["offload"] == "all"
    with pytest.raises(
        DsplanError, match="offloads 'all', and 'zero2' of backend 'native' can offload optimizer, nvme;"
    ):
        limited(both, "zero2")
    with pytest.raises(DsplanError, match="'zero1' of backend 'deepspeed' can offload optimizer; change"):
        limited({"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "zero1", "deepspeed")
    with pytest.raises(DsplanError, match="'ddp' of backend 'torch' can offload nothing"):
        limited({"offload_optimizer": on_cpu}, "ddp")


PAGE = (Path(__file__).parents[3] / "docs/reference/config.md").read_text(encoding="utf-8")


def keys_read(keys: Keys) -> set[str]:
    """The keys that every engine reads, in a section and those below it."""
    below = [keys_read(section) for section in keys.sections.values()]
    return set(keys.read | keys.own).union(*below)


def test_the_page_names_every_key_and_class() -> None:
    words = set(re.findall(r"[\w]+", PAGE))
    assert keys_read(TOP) - words == set()
    built_in = {plain(word) for word in words}
    assert {*OPTIMIZERS, *SCHEDULERS, *map(plain, DEEPSPEEDS_OWN)} - built_in == set()


def test_the_examples_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
    read = read_config(config)
    assert (read.precision, read.zero.offload_ratio, read.communication.compression) == ("bf16", 0.5, "int8")
    assert read.scheduler is not None
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(OF_OPTIMIZERS, "_own", {})
    monkeypatch.setattr(OF_SCHEDULERS, "_own", {})
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    assert type(names["optimizer"]).__name__ == "Signs"
    assert names["scheduler"].step_size == 10


def test_a_config_without_a_word_leaves_defaults_to_the_algorithms() -> None:
    """Nothing of the config repeats a number of loss scaling, adapters or offload; the page has those that run."""
    config = read_config({"lora": {"method": "lora"}})
    assert read_scale_settings(config.fp16) == ScaleSettings()
    assert read_method(config, {}, None).rank == LORA_RANK
    assert (config.zero.pin_memory, config.zero.buffer_count) == (None, None)
    scale = ScaleSettings()
    assert f"`initial_scale_power` ({math.log2(scale.initial):.0f})" in PAGE
    assert f"`loss_scale_window` ({scale.window}) steps" in PAGE
    assert f"`hysteresis` ({scale.hysteresis}) steps" in PAGE
    assert f"`min_loss_scale` ({scale.floor:g})" in PAGE


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis is 0; it must be a whole number of at least 1"),
        ({"lora": {"dropout": 1.5}}, "lora.dropout is 1.5; it must be a number from 0 to 1"),
        ({"dataloader": {"pin_memory": 1}}, "dataloader.pin_memory is 1; it must be true or false"),
        ({"checkpoint": {"directory": 1}}, "checkpoint.directory is 1; it must be a string"),
        ({"pipeline": {"partition": "odd"}}, "one of uniform, parameters, seconds, best, profile"),
        ({"profiler": {"active": 0}}, "profiler.active is 0; it must be a whole number of at least 1"),
    ],
)
def test_sections_are_read_as_their_fields_say(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(DsplanError, match=re.escape(problem)):
        read_config(section)
