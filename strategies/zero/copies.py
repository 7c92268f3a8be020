"""Copies between a device and host memory that go on while both compute.

Host memory that a GPU copies from or to is page-locked ("pinned"): only then does a copy run beside kernels. Copies
down and copies up have a stream each, since a GPU has an engine for each direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from strategies.zero.wire import Arrival

DOWN, UP = "dsplan::gradients_down", "dsplan::weights_up"


class Copies(ABC):
    """Begins copies; what was copied from or to must not be touched before the copy has arrived."""

    @abstractmethod
    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory, [elements], uninitialized."""

    @abstractmethod
    def down(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy from the device to the host, after what the device was asked to do so far; `wait` holds up the host."""

    @abstractmethod
    def up(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Copy from the host to the device, after what it was asked to do so far; after `wait` it may be used there."""

    @abstractmethod
    def aside(self) -> AbstractContextManager[Arrival]:
        """A context in which the device works beside its usual stream; gives what to wait for after it."""


class StreamCopies(Copies):
    """Copies of a GPU, in streams beside the one that computes."""

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device, self._pins = device, pins
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=self._pins)

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        return _OnHost(self._copied(DOWN, self._down, source, target))

    def up(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        return _OnDevice(self._copied(UP, self._up, source, target))

    @contextmanager
    def aside(self) -> Iterator[Arrival]:
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
            ThreadPoolExecutor(1, thread_name_prefix=f"dsplan-copies-{way}") for way in ("down", "up")
        )

    def room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def down(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        return _Copied(self._down.submit(self._copy, DOWN, source, target))

    def up(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        return _Copied(self._up.submit(self._copy, UP, source, target))

    @contextmanager
    def aside(self) -> Iterator[Arrival]:
        yield _There()

    def _copy(self, label: str, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.profiler.record_function(label):
            target.copy_(source)


def copies_of(device: torch.device, *, pins: bool) -> Copies:
    """The copies that suit a device."""
    return StreamCopies(device, pins=pins) if device.type == "cuda" else ThreadCopies()


class _OnHost:
    """The host waits for an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _OnDevice:
    """The stream that computes waits for an event; the host goes on."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _Copied:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


class _There:
    def wait(self) -> None:
        return None
