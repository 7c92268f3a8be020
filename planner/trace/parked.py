"""Parked: what forward saved for backward waits in host memory.

On a GPU the copies run on a stream of their own, beside the module's computation, into pinned memory; when the module
ends they must have ended too, since from then on the tensor may be changed. Backward uses first what was parked last:
while one tensor is at work, the one parked before it is on its way back. Fake tensors have nothing to copy and take no
memory while they are parked.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_LAST: dict[torch.device, weakref.ref[Parked]] = {}


class Parking(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered, tensors that autograd saves are parked until they are asked for."""

    def __init__(self) -> None:
        initialize: Any = super().__init__
        initialize(park, unpark)

    def __exit__(self, *exception: object) -> None:
        leave: Any = super().__exit__
        leave(*exception)
        for device, stream in _STREAMS.items():
            torch.cuda.current_stream(device).wait_stream(stream)


def park(tensor: torch.Tensor) -> Parked | FakeParked:
    """Begin to copy a tensor to the host."""
    if isinstance(tensor, FakeTensor):
        return FakeParked(tensor)
    before = _LAST.get(tensor.device)
    parked = Parked(tensor, before)
    _LAST[tensor.device] = weakref.ref(parked)
    return parked


def unpark(parked: Parked | FakeParked) -> torch.Tensor:
    """The tensor on its device again."""
    return parked.back()


class FakeParked:
    """A fake tensor's description."""

    def __init__(self, tensor: FakeTensor) -> None:
        self._like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        self._shape, self._stride = tensor.shape, tensor.stride()

    def back(self) -> torch.Tensor:
        return torch.empty_strided(self._shape, self._stride, **self._like)


class Parked:
    """One tensor in host memory; `before` is the one that was parked before it on the same device."""

    def __init__(self, tensor: torch.Tensor, before: weakref.ref[Parked] | None) -> None:
        self._device, self._before = tensor.device, before
        self._coming: torch.Tensor | None = None
        self._host = host_room(tensor)
        stream = _stream(tensor.device)
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory must not be used again before it is copied

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._coming is not None:
            return
        stream = _stream(self._device)
        if stream is None:
            self._coming = self._host.to(self._device, copy=True)
            return
        with torch.cuda.stream(stream):
            self._coming = self._host.to(self._device, non_blocking=True)

    def back(self) -> torch.Tensor:
        """The tensor on its device; the one that backward asks for next begins its way."""
        self.fetch()
        tensor, self._coming = self._coming, None
        assert tensor is not None
        stream = _stream(self._device)
        if stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            tensor.record_stream(current)
            before = self._before() if self._before is not None else None
            if before is not None:
                before.fetch()
        return tensor


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor, pinned where it comes from a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    if device not in _STREAMS:
        kind: Any = torch.cuda.Stream  # without annotations
        _STREAMS[device] = kind(device)
    return _STREAMS[device]
