"""Asks torch's own trackers: MemTracker for one device, FSDPMemTracker for FSDP2, under fake tensors, without a GPU.

Two whole steps of the transformers model are run, so that the second has the optimizer's states; the answer is the
tracker's peak. The process group is torch's fake one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.types.job import Job
from strategies.tracing.step.build import Subject, subject_of

STEPS = 2


def tracked_bytes(job: Job) -> int:
    """Return the peak that torch's tracker says.

    Raises:
        RuntimeError: the tracker, or an operation under it, fails.
    """
    chosen = job.configuration
    subject = subject_of(job.facts, attention=chosen.attention, task=job.workload.task)
    if chosen.activation_checkpointing == "full":
        arguments = {"use_reentrant": False}
        subject.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)  # type: ignore[operator]
    if chosen.precision == "bf16-pure":
        subject.module.to(torch.bfloat16)
    sharded = chosen.strategy == "fsdp"
    with _mesh_of(chosen.world_size) as mesh, FakeTensorMode():
        module: Any = _materialised(subject.module)
        if sharded:
            _shard(subject, chosen.precision, mesh)
        optimizer = _optimizer(module, chosen.optimizer)
        tracker = FSDPMemTracker(module, optimizer) if sharded else MemTracker()
        if not sharded:
            tracker.track_external(module, optimizer)
        with tracker:
            for _ in range(STEPS):
                _step(subject, module, optimizer, (job, tracker))
        return int(max(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()))


def _materialised(module: nn.Module) -> nn.Module:
    """Return the module with every weight and buffer made anew under the fake tensor mode; what is tied stays tied."""
    copies: dict[int, torch.Tensor] = {}
    for part in module.modules():
        own: tuple[Any, Any] = (part._parameters, part._buffers)
        for tensors in own:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = copies.setdefault(id(tensor), _like(tensor))
    return module


def _like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextlib.contextmanager
def _mesh_of(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _shard(subject: Subject, precision: str, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*subject.blocks, subject.module):
        fully_shard(block, mesh=mesh, mp_policy=policy)


def _optimizer(module: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=1e-3)
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=name == "adamw", fused=name == "adamw-fused")


def _step(subject: Subject, module: Any, optimizer: torch.optim.Optimizer, question: tuple[Job, MemTracker]) -> None:
    job, tracker = question
    chosen = job.configuration
    batch = subject.batch_of(chosen.micro_batch_size, chosen.sequence_length, job.workload.source_length or None)
    autocast = chosen.precision == "bf16" and chosen.strategy == "single"
    for _ in range(chosen.gradient_accumulation_steps):
        tracker.reset_mod_stats()  # it takes one call of a module, not several
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = module(**batch).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
