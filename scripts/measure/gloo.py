"""Ranks whose collectives have released their tensors by the time that somebody has waited for them.

Gloo runs a collective on a thread of its own, which holds the tensors until it looks for the next one: on a busy
machine well into what follows. With one thread a barrier begins only when all before it are released, so that a
barrier after every wait makes true peaks those of the model alone.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import distributed as data_parallel

from dsplan.diagnostics.bench.rank_pool import RankPool

_TIMEOUT = timedelta(seconds=240)
_settling = False


def quiet(pool: RankPool) -> RankPool:
    """Return the pool with its ranks joined anew."""
    folder = tempfile.mkdtemp(prefix="dsplan-ranks-")
    weakref.finalize(pool, shutil.rmtree, folder, ignore_errors=True)  # groups that ranks make later meet in it too
    pool.run(_rejoin, str(Path(folder, "rendezvous")))
    return pool


def _rejoin(file: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch_c10d: Any = c10d
    torch_c10d.ProcessGroupGloo = _OneThread
    torch_c10d.Work.wait = _settled(torch_c10d.Work.wait)
    # DDP waits for what it broadcasts in C++.
    replicas: Any = data_parallel
    replicas._sync_module_states = _settled(replicas._sync_module_states)
    dist.init_process_group("gloo", store=FileStore(file, ranks), rank=rank, world_size=ranks, timeout=_TIMEOUT)


class _OneThread(c10d.ProcessGroupGloo):
    def __init__(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> None:
        settings: Any = super()
        options = settings._Options()
        options._devices, options._threads, options._timeout = [settings.create_default_device()], 1, timeout
        settings.__init__(store, rank, ranks, options)


def _settled(waits: Any) -> Any:
    @wraps(waits)
    def wait(*args: Any, **kwargs: Any) -> Any:
        result = waits(*args, **kwargs)
        _settle()
        return result

    return wait


def _settle() -> None:
    """Run a barrier in every group of all ranks."""
    global _settling
    if _settling or not dist.is_initialized():
        return
    _settling = True
    try:
        for group in list(c10d._world.pg_map):
            if group.size() == dist.get_world_size():
                dist.barrier(group)
    finally:
        _settling = False
