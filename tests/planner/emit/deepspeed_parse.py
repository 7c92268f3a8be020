"""Reads [[world_size, config], ...] from stdin and prints what DeepSpeed understood of each config."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

import deepspeed
import deepspeed.ops
from deepspeed.runtime.config import DeepSpeedConfig


class World:
    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size


def main() -> None:
    # Nothing here communicates: without this its shared-memory collectives would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = Path(tempfile.mkdtemp()) / "store"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=f"file://{store}", rank=0, world_size=1)
    answers = []
    for world_size, config in json.load(sys.stdin):
        parsed = DeepSpeedConfig(config, mpu=World(world_size))
        zero = parsed.zero_config
        answers.append(
            {
                "batch": [parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu],
                "accumulation": parsed.gradient_accumulation_steps,
                "stage": int(zero.stage),
                "bf16": parsed.bfloat16_config.enabled,
                "fp16": parsed.float16_config.enabled,
                "autocast": parsed.torch_autocast_enabled,
                "optimizer": parsed.optimizer_name,
                "offload_optimizer": zero.offload_optimizer and zero.offload_optimizer.device,
                "offload_param": zero.offload_param and zero.offload_param.device,
                "prefetch": zero.prefetch_bucket_size,
                "unknown": sorted(set(config.get("zero_optimization", {})) - known_keys(zero)),
            }
        )
    print(json.dumps(answers))


def known_keys(zero: object) -> set[str]:
    fields = type(zero).model_fields  # type: ignore[attr-defined]
    return set(fields) | {field.alias for field in fields.values() if field.alias}


main()
