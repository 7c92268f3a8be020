"""Replicated data parallelism: torch's DistributedDataParallel with its defaults."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from strategies.backends.zero.collectives import Collectives, collectives_over
from strategies.backends.zero.compress import EightBits, Memory
from strategies.backends.zero.flat_shard import Layout
from strategies.distributed.environment import ensure_group
from strategies.engine.torch_engine import TorchEngine, TorchStrategy
from strategies.errors import CannotRun
from strategies.modules.compression import Codec, GradientTravel, gradient_travel
from strategies.modules.precision import autocast
from strategies.parallel.empty import give_memory, has_stand_ins
from strategies.parallel.split import parts_of
from strategies.protocols import TrainingParts
from strategies.torch_compat.distributed import ignore_in_ddp

if TYPE_CHECKING:
    Mean = torch.futures.Future[torch.Tensor]

# One process, one device.


class Single(TorchStrategy):
    """The model as it is, on this process's device."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to this process's device."""
        if self.environment.world_size > 1:
            raise CannotRun(
                f"strategy 'single' runs one process and this job has {self.environment.world_size}; start one process"
                " or choose 'ddp'"
            )
        give_memory(model.parameters(), self.environment.device)
        return model.to(self.environment.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the plan's precision."""
        return autocast(self.configuration.precision, self.environment.device)


class ReplicatedDataParallel(TorchStrategy):
    """Every rank holds the whole model; gradients are averaged in buckets while backward runs."""

    _bucket_mib: float | None = None

    def engine(self, parts: TrainingParts) -> TorchEngine:
        """Make the engine, whose gradients travel as the script asks."""
        travel = gradient_travel(parts)
        self._bucket_mib = parts.script.communication.bucket_mib
        engine = super().engine(parts)
        collectives = collectives_over("dp_cp", self.mesh)
        replica = cast("DistributedDataParallel", engine.wrapped)
        compress(replica, travel, collectives, lambda: engine.loss_scale)
        return engine

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP."""
        ensure_group(self.environment)
        device, is_read = self.environment.device, has_stand_ins(model)
        devices = [device] if device.type == "cuda" else None
        give_memory(model.parameters(), device)
        # Ranks that split layers between them hold other weights than these.
        group = None if self.mesh.is_data_parallel else self.mesh.group("dp_cp")
        if experts := parts_of(model).experts:  # other ranks have others
            ignore_in_ddp(model, sorted(experts))
        return DistributedDataParallel(
            model.to(device),
            device_ids=devices,
            bucket_cap_mb=self._bucket_mib,
            process_group=group,
            init_sync=not is_read,  # every rank reads them itself
        )

    def synchronization(self, module: nn.Module, *, reduces: bool) -> AbstractContextManager[object]:
        """Leave gradients on their rank in the backward pass of this forward pass, unless it reduces."""
        # DDP decides in forward whether the following backward reduces, so only forward needs to be inside.
        wrapper = cast("DistributedDataParallel", module)
        return nullcontext() if reduces else wrapper.no_sync()

    def complete(self, module: nn.Module) -> None:
        """Reduce the gradients that are there."""
        # Its hooks are on the sums of gradients: adding nothing to each sends it on its way.
        wrapper = cast("DistributedDataParallel", module)
        wrapper.reducer.prepare_for_backward([])
        parameters = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        nothing = [parameter.new_zeros(()).expand_as(parameter) for parameter in parameters]
        torch.autograd.backward(parameters[::-1], nothing[::-1])

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the plan's precision."""
        return autocast(self.configuration.precision, self.environment.device)


# DDP with gradients that travel in 8 bits, as a communication hook.


_HOOKS: dict[torch.dtype, Callable[..., Any]] = {torch.bfloat16: bf16_compress_hook, torch.float16: fp16_compress_hook}


def compress(
    module: DistributedDataParallel, travel: GradientTravel, collectives: Collectives, unit: Callable[[], float]
) -> None:
    """Make a module's gradients travel as asked; `unit` is the loss scale of the moment."""
    if travel.codec is not None and collectives.ranks.world_size > 1:
        mean = EightBitMean(collectives, travel.codec, unit, next(module.parameters()).device)
        # A function of its own: DDP compares annotations with classes, and these are strings.
        module.register_comm_hook(None, lambda state, bucket: mean.begin(bucket))
    elif travel.dtype in _HOOKS:
        hook = _HOOKS[travel.dtype]
        # Under its own name DDP takes the one of bf16 for NCCL's alone, and gloo adds bf16 as well.
        module.register_comm_hook(module.process_group, lambda state, bucket: hook(state, bucket))


class EightBitMean:
    """The mean over ranks of DDP's buckets, one after the other in the order of DDP, beside the backward pass.

    On a GPU everything is queued on a stream of its own; between CPUs, where messages are waited for, on a thread.
    """

    def __init__(self, collectives: Collectives, codec: Codec, unit: Callable[[], float], device: torch.device) -> None:
        self._collectives, self._codec, self._unit, self._device = collectives, codec, unit, device
        self._buckets: dict[int, _Bucket] = {}
        self._thread = ThreadPoolExecutor(max_workers=1) if device.type == "cpu" else None
        self._stream = None if device.type == "cpu" else _stream_on(device)

    def begin(self, bucket: Any) -> Mean:
        """Begin the mean of a bucket (DDP's `GradBucket`), which takes the place of its gradients."""
        buffer, index = bucket.buffer(), bucket.index()
        # DDP orders its buckets anew after the first step.
        members = tuple(id(parameter) for parameter in bucket.parameters())
        same = self._buckets.get(index)
        if same is None or same.members != members:
            layout = Layout(elements=buffer.numel(), ranks=self._collectives.ranks)
            same = self._buckets[index] = _Bucket(self._collectives, self._codec, self._unit, layout, members)
        return self._on_stream(same, buffer) if self._thread is None else self._on_thread(same, buffer)

    def _on_stream(self, bucket: _Bucket, buffer: torch.Tensor) -> Mean:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer.record_stream(self._stream)
            mean: Mean = torch.futures.Future(devices=[self._device])
            mean.set_result(bucket.mean(buffer))
        return mean

    def _on_thread(self, bucket: _Bucket, buffer: torch.Tensor) -> Mean:
        assert self._thread is not None
        mean: Mean = torch.futures.Future()

        def run() -> None:
            try:
                mean.set_result(bucket.mean(buffer))
            except Exception as problem:  # whatever it is, the backward pass that waits for it must raise it
                failed: Any = mean  # its method is annotated with the kind of result
                failed.set_exception(problem)

        self._thread.submit(run)
        return mean


def _stream_on(device: torch.device) -> torch.cuda.Stream:
    kind: Any = torch.cuda.Stream  # without annotations
    stream: torch.cuda.Stream = kind(device)
    return stream


Members = tuple[int, ...]
"""The parameters of a bucket, by their ids."""


class _Bucket:
    """One bucket's two halves and what their rounding left out."""

    def __init__(
        self, collectives: Collectives, codec: Codec, unit: Callable[[], float], layout: Layout, members: Members
    ) -> None:
        self.members = members
        self._collectives, self._codec, self._layout = collectives, codec, layout
        self._sums, self._memory = EightBits(collectives, codec, unit), Memory(codec, unit)

    def mean(self, buffer: torch.Tensor) -> torch.Tensor:
        """Replace a bucket's gradients by their mean over ranks."""
        codec, ranks, here = self._codec, range(self._collectives.ranks.world_size), self._collectives.ranks.rank
        own = self._sums.reduce_scatter(buffer, self._layout).total(torch.float32).div_(len(ranks))
        self._memory.restart()
        message = codec.encode(own, self._memory.of(here, own))
        sizes = [stop - start for start, stop in (self._layout.bounds(rank) for rank in ranks)]
        nothing = message.new_empty(0)
        incoming = [nothing if r == here else message.new_empty(codec.message_bytes(sizes[r])) for r in ranks]
        self._collectives.all_to_all([nothing if r == here else message for r in ranks], incoming).wait()
        for rank in ranks:
            values = codec.room(sizes[rank], buffer)
            codec.add(message if rank == here else incoming[rank], values)
            buffer[slice(*self._layout.bounds(rank))].copy_(values[: sizes[rank]])
        return buffer
