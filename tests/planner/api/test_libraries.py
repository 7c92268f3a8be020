"""The methods of TrainingConfig against the libraries whose arguments they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsplan import DsplanError, HardwareSelector
from dsplan.training_config import TrainingConfig
from planner.emit import EmitOptions


def configuration(model: str, gpus: int, limit: float | None = None, **settings: Any) -> TrainingConfig:
    selector = HardwareSelector(gpu="A100-SXM4-80GB", **settings)
    return selector.get_distributed_training_config(None, model, gpu_count=gpus, max_memory_gb=limit)


def first_of(strategy: str) -> TrainingConfig:
    """A configuration of the strategy word DDP, FSDP or DeepSpeed, wherever the planner chooses it."""
    models = ("facebook/opt-125m", "facebook/opt-1.3b", "facebook/opt-6.7b", "facebook/opt-13b")
    for model in models:
        for limit in (None, 40, 24, 16):
            config = configuration(model, 4, limit)
            if config["distributed_strategy"] == strategy:
                return config
    raise AssertionError(f"{strategy} was never chosen")


def test_transformers_takes_the_training_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    config = first_of("DDP")
    arguments = TrainingArguments(**config.to_training_arguments(EmitOptions(cpu=True)), output_dir=str(tmp_path))
    assert arguments.per_device_train_batch_size == config["per_gpu_batch_size"]
    assert arguments.bf16


def test_fully_shard_trains_with_the_fsdp_kwargs(tmp_path: Path) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    kwargs = first_of("FSDP").to_fsdp_kwargs()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, **kwargs)
        output = model(torch.ones(2, 8))
        output.float().sum().backward()
        gradient = model[0].weight.grad
        assert (output.dtype, gradient.dtype, gradient.shape) == (torch.bfloat16, torch.float32, (8, 8))
    finally:
        torch.distributed.destroy_process_group()


def test_methods_of_another_strategy_refuse_in_one_line() -> None:
    for config, method in ((first_of("DDP"), "to_fsdp_kwargs"), (first_of("FSDP"), "to_deepspeed_config")):
        with pytest.raises(DsplanError, match="cannot be written as") as caught:
            getattr(config, method)()
        assert "\n" not in str(caught.value)


def test_the_deepspeed_config_is_json_with_explicit_numbers() -> None:
    config = first_of("DeepSpeed")
    text = json.dumps(config.to_deepspeed_config())
    assert '"auto"' not in text
    assert json.loads(text)["train_micro_batch_size_per_gpu"] == config["per_gpu_batch_size"]


def test_a_config_is_a_read_only_mapping() -> None:
    config = first_of("DDP")
    assert dict(config)["gpu_count"] == 4
    assert len(config) == len(list(config))
    assert "fsdp_config" not in config
    with pytest.raises(TypeError):
        config["gpu_count"] = 2  # type: ignore[index]
