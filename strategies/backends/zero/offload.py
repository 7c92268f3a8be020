"""Offload: masters, optimizer states and the step in host memory, while weights and gradients stay where they compute.

A gradient goes to the host once it is reduced over ranks, while backward continues (Ren et al. 2021, ZeRO-Offload).
The step runs there, bucket by bucket, and the weights of a bucket return while the next one is stepped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from planner.cost.zero_bucket_sizes import OffloadRatio
from strategies.backends.zero.collectives import Arrival, Arrived
from strategies.backends.zero.flat_shard import Bucket, Place
from strategies.backends.zero.nvme import Disk
from strategies.backends.zero.settings import OffloadSettings, ZeroSettings

# Copies between a device and host memory that continue while both compute.


DOWN, UP = "dsplan::gradients_down", "dsplan::weights_up"


class Copies(ABC):
    """Begins copies; what was copied from or to must not be touched before the copy has arrived."""

    @abstractmethod
    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory, [elements], uninitialized."""

    @abstractmethod
    def down(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy from the device to the host, after what the device was asked to do so far; `wait` holds up the host."""

    @abstractmethod
    def up(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy from the host to the device, after what it was asked to do so far; after `wait` it may be used there."""

    @abstractmethod
    def aside(self) -> AbstractContextManager[Arrival]:
        """Have the device work beside its usual stream; gives what to wait for after it."""


class StreamCopies(Copies):
    """Copies of a GPU, in streams beside the one that computes."""

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device, self._pins = device, pins
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory, page-locked where asked."""
        return torch.empty(elements, dtype=dtype, pin_memory=self._pins)

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy beside what the device computes."""
        return _OnHost(self._copied(DOWN, self._down, source, target))

    def up(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy beside what the device computes."""
        return _OnDevice(self._copied(UP, self._up, source, target))

    @contextmanager
    def aside(self) -> Iterator[Arrival]:
        """Work on the stream of copies to the device."""
        arrival = _OnDevice(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            yield arrival
            arrival.event.record(self._up)

    def _copied(
        self, label: str, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.profiler.record_function(label), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # The allocator must not give the device's memory away before the copy is over.
        (source if source.is_cuda else target).record_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event


class ThreadCopies(Copies):
    """Copies of a device without streams, in a thread for each direction."""

    def __init__(self) -> None:
        self._down, self._up = (
            ThreadPoolExecutor(1, thread_name_prefix=f"dsplan-copies-{direction}") for direction in ("down", "up")
        )

    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory."""
        return torch.empty(elements, dtype=dtype)

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy in a thread."""
        return _Copied(self._down.submit(self._copy, DOWN, source, target))

    def up(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy in a thread."""
        return _Copied(self._up.submit(self._copy, UP, source, target))

    @contextmanager
    def aside(self) -> Iterator[Arrival]:
        """Work as usual: there is no stream."""
        yield Arrived()

    def _copy(self, label: str, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.profiler.record_function(label):
            target.copy_(source)


def copies_of(device: torch.device, *, pins: bool) -> Copies:
    """Return the copies that suit a device."""
    return StreamCopies(device, pins=pins) if device.type == "cuda" else ThreadCopies()


class _OnHost:
    """The host waits for an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _OnDevice:
    """The stream that computes waits for an event; the host continues."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _Copied:
    def __init__(self, copy: Future[None]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy.result()


_UNDER_WAY = 4
"""Gradients of so many buckets may be on their way down at once; more would pile up on the device."""


class Offload:
    """States that leave the device, and the way there and back.

    `copies` is None if the device's memory is the host's, `disk` where no state goes further than that. `weights`:
    a rank's part of stage 3's weights goes to the host too.
    """

    def __init__(self, settings: OffloadSettings, copies: Copies | None) -> None:
        self.copies = copies
        self.disk = Disk(Path(settings.nvme_path), settings.buffers) if settings.kind == "nvme" else None
        self.weights = settings.kind in ("all", "nvme") and copies is not None
        self._place = Place.DEVICE if settings.kind == "none" else Place.DISK if self.disk is not None else Place.HOST
        self._ratio = OffloadRatio(settings.ratio)
        self._coming_back: set[Bucket] = set()

    def chosen(self, bucket: Bucket) -> Place:
        """Return where the states of the next bucket will live."""
        return self._place if self._ratio.takes(bucket.layout.elements) else Place.DEVICE

    def move(self, bucket: Bucket, *, keeps: bool) -> None:
        """Move a bucket's master to where its states live; its weights stay on the device where `keeps`."""
        if self.copies is not None:
            is_alike = bucket.master.dtype == bucket.part.dtype
            bucket.master = self._on_host(bucket.master, is_copied=is_alike)
            if keeps or not self.weights:
                self._coming_back.add(bucket)
            else:
                bucket.part = bucket.master if is_alike else self._on_host(bucket.part, is_copied=True)
        if self.disk is not None:
            self.disk.adopt(bucket)

    def fix(self, bucket: Bucket) -> None:
        """Move the part of weights that are not trained."""
        if self.weights:
            bucket.part = self._on_host(bucket.part, is_copied=True)

    def renew(self, bucket: Bucket) -> Arrival | None:
        """Begin to bring a bucket's weights up to date with its master; return None if that is done at once."""
        if bucket not in self._coming_back or self.copies is None:
            bucket.part.copy_(bucket.master)
            return None
        ready = bucket.master
        if self.disk is not None or ready.dtype != bucket.part.dtype:
            ready = self.copies.room(bucket.part.numel(), bucket.part.dtype).copy_(bucket.master)
        return self.copies.up(ready, bucket.part)

    @contextmanager
    def beside(self) -> Iterator[Sequence[Arrival]]:
        """Fetch weights inside from the host beside what the device computes; gives what to wait for."""
        if self.copies is None or not self.weights:
            yield ()
            return
        with self.copies.aside() as arrival:
            yield (arrival,)

    def _on_host(self, tensor: torch.Tensor, *, is_copied: bool) -> torch.Tensor:
        """Return `tensor` in host memory, page-locked where a device copies from it."""
        if self.copies is None or not is_copied:
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        return self.copies.room(tensor.numel(), tensor.dtype).copy_(tensor)


class HostGradients:
    """Sums of gradients that go to host memory as they come, and add up there.

    They add up in the settings' `accumulate`, None for the dtype in which they come. `rounds`: the sums have been
    rounded to what they travel in, as NCCL does it, so that there is no more of them to bring down.
    """

    def __init__(self, copies: Copies, settings: ZeroSettings, *, rounds: bool) -> None:
        self._copies, self._accumulate = copies, settings.accumulate
        self._travels, self._rounds = settings.travel.dtype, rounds and settings.travel.codec is None
        self._coming: deque[tuple[Bucket, torch.Tensor, Arrival]] = deque()

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype in which a bucket's sums come."""
        return (self._travels if self._rounds else self._accumulate) or bucket.dtype

    def keep(self, bucket: Bucket, total: torch.Tensor) -> None:
        """Begin to copy a sum down; it joins the earlier ones of its bucket when it is there."""
        while len(self._coming) >= _UNDER_WAY:
            self._receive()
        here = self._copies.room(total.numel(), total.dtype)
        self._coming.append((bucket, here, self._copies.down(total, here)))

    def settle(self) -> None:
        """Wait for all that is on its way."""
        while self._coming:
            self._receive()

    def _receive(self) -> None:
        bucket, here, arrival = self._coming.popleft()
        arrival.wait()
        if bucket.gradient is None:
            bucket.gradient = here.to(self._accumulate or here.dtype)
        else:
            bucket.gradient.add_(here)


@contextmanager
def fused_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have torch's optimizers step with their fused kernels inside, where the script left the choice open.

    On a host the fused kernel reads each state once where the loop over tensors, torch's choice there, reads them a
    dozen times.
    """
    # Not SGD: its kernel (torch 2.13) refuses parameters some of which have momentum and some not yet.
    is_known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    open_ones = [group for group in optimizer.param_groups if is_known and not any(map(group.get, _DECIDED))]
    open_ones = [group for group in open_ones if group["fused"] is None and group["foreach"] is None]
    for group in open_ones:
        group["fused"] = True
    try:
        yield
    finally:
        for group in open_ones:
            group["fused"] = None


_DECIDED = ("capturable", "differentiable")


def offload_of(settings: OffloadSettings, device: torch.device) -> Offload:
    """Return the offload that settings ask for; on a CPU there is nothing to leave but for a disk.

    Raises:
        CannotRun: states cannot be put on the disk.
    """
    copies = copies_of(device, pins=settings.pins) if settings.kind != "none" and device.type != "cpu" else None
    return Offload(settings, copies)
