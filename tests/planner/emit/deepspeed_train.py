"""Reads configs from stdin, trains a two-layer model three steps under each on one CPU rank, prints the losses.

There are none of a config in a precision that DeepSpeed has not got here.
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
    print(json.dumps([losses(config) for config in json.load(sys.stdin)]))


main()
