"""The few rates that a first plan on a machine needs, measured in about two seconds."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from hardware_db.microbench.collectives import all_reduce_latency, all_reduce_rate
from hardware_db.microbench.matmul import matmul_rate
from hardware_db.microbench.memory import host_link_rate, memory_rate
from hardware_db.microbench.optimizer import cpu_adamw_rate
from hardware_db.microbench.rate import Rate

_MIB = 1 << 20
# Large enough to fill a GPU, small enough for a few milliseconds on two cores.
_GPU_EDGE = 4096
_CPU_EDGE = 512


def quick_rates(device: torch.device) -> tuple[Rate, ...]:
    """Matrix products, memory, host link, CPU AdamW, and all-reduce where a process group of several ranks is live.

    All ranks call this at the same time, so that what they share (cores, memory bus) is shared as in training; `ranks`
    of every rate is therefore the world size.
    """
    gpu = device.type == "cuda"
    edge = _GPU_EDGE if gpu else _CPU_EDGE
    rates = [matmul_rate(device, dtype, edge) for dtype in ("fp32", "bf16")]
    rates.append(memory_rate(device, (256 if gpu else 64) * _MIB))
    if gpu:
        rates.append(matmul_rate(device, "fp16", edge))
        rates.append(host_link_rate(device, 64 * _MIB))
    rates.append(cpu_adamw_rate(2 * _MIB))
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        rates.append(all_reduce_latency(device))
        rates.append(all_reduce_rate(device, 16 * _MIB))
    return tuple(replace(rate, ranks=ranks) for rate in rates)
