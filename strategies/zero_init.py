"""ZeRO-3 from a model that lies on the host: split parameter by parameter.

Handed a whole model, `deepspeed.initialize` puts all of it on every device before it splits it, so that a model larger
than one device could not be loaded for the stage that exists to train it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def partition_model(library: Any, model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Split a model's parameters over all ranks in the dtype that `config` trains in; rank 0's values count.

    The device holds one whole parameter at a time. A model made under `deepspeed.zero.Init` is split already.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return
    # DeepSpeed reads the number of ranks from its own view of torch's process group, which `initialize` opens later.
    library.init_distributed(dist_backend=torch.distributed.get_backend())
    dtype = _dtype(config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    library.zero.Init(module=model, config_dict_or_path=dict(config), dtype=dtype)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled"):
            return dtype
    return torch.float32
