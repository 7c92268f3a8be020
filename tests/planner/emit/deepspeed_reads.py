"""Reads {"parse": [[world_size, config], ...], "train": [config, ...]} from stdin; prints what DeepSpeed makes of it.

Of a config that is parsed, what it understood, or with what words it refused; of one that is trained with, the losses
of three steps of a two-layer model on one CPU rank, none in a precision that DeepSpeed has not got here.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig


class World:
    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size


def understood(world_size: int, config: dict[str, object]) -> dict[str, object]:
    try:
        parsed = DeepSpeedConfig(config, mpu=World(world_size))
    except AssertionError as refusal:
        return {"refused": str(refusal)}
    zero = parsed.zero_config
    return {
        "batch": [parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu],
        "accumulation": parsed.gradient_accumulation_steps,
        "stage": int(zero.stage),
        "bf16": parsed.bfloat16_config.enabled,
        "fp16": parsed.float16_config.enabled,
        "autocast": parsed.torch_autocast_enabled,
        "optimizer": parsed.optimizer_name,
        "offload_optimizer": zero.offload_optimizer and zero.offload_optimizer.device,
        "offload_param": zero.offload_param and zero.offload_param.device,
        "zero_plus": [zero.zero_hpz_partition_size, zero.zero_quantized_weights, zero.zero_quantized_gradients],
        "prefetch": zero.prefetch_bucket_size,
        "unknown": sorted(set(config.get("zero_optimization", {})) - known_keys(zero)),
    }


def known_keys(zero: object) -> set[str]:
    fields = type(zero).model_fields  # type: ignore[attr-defined]
    return set(fields) | {field.alias for field in fields.values() if field.alias}


def losses(config: dict[str, object]) -> list[float]:
    if "bf16" in config and not get_accelerator().is_bf16_supported():
        return []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = next(engine.parameters()).dtype
    samples = torch.randn(2, 32)
    history = []
    for _ in range(3):
        loss = engine(samples.to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        history.append(loss.item())
    engine.destroy()
    return history


def main() -> None:
    # One rank has nobody to share memory with: without this DeepSpeed's collectives for that would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = Path(tempfile.mkdtemp()) / "store"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=f"file://{store}", rank=0, world_size=1)
    question = json.load(sys.stdin)
    parsed = [understood(world_size, config) for world_size, config in question["parse"]]
    print(json.dumps({"parse": parsed, "train": [losses(config) for config in question["train"]]}))


main()
