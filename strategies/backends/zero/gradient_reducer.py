"""The gradient reducer: gradients are sent in buckets while backward makes more, and are freed after reduction.

Every parameter's hook puts its gradient into its bucket. A bucket whose gradients are all there is sent at once, in an
order that all ranks agreed on (a rank with a branch of its own must not send other buckets than its peers); the sum
over ranks of this rank's run stays, the gradients go. In a micro-batch that does not reduce they wait in the
parameters.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strategies.backends.zero.collectives import Collectives, Sum
from strategies.backends.zero.flat_shard import Bucket, Place, Slot
from strategies.backends.zero.offload import HostGradients
from strategies.distributed.consensus import on_rank_zero
from strategies.errors import CannotRun

Listener = Callable[[Bucket], None]


def _tell(reducer: weakref.ref[Reducer], parameter: nn.Parameter) -> None:
    """Run a parameter's hook, which does not hold the reducer.

    torch hides such hooks from the garbage collector, which would never free an engine and a model that they connect.
    """
    if (alive := reducer()) is not None:
        alive._arrived(parameter)


class Reducer:
    """Sums the gradients of buckets over ranks during backward; what `finish` leaves is in `bucket.gradient`.

    `accumulate` is the dtype in which gradients wait for the step and `reduce` that in which they travel, None for the
    parameter's own. `collectives_of` gives every bucket its collectives, which may remember what they left out of it.
    `used` holds the parameters that had a gradient since the last `clear`. `when_made` is called with a bucket as soon
    as its gradients are all made, `when_reduced` when their sum is there, or on its way to the `host` that steps it.
    Gradients are divided by `mean_over` before they travel. `group` are the ranks that have these buckets, all by
    default; `replicas` those of them that have this rank's shards too, between which the sums of a step are all-reduced
    once, behind its last backward pass. `when_unasked` may `begin` where a gradient is made without that: of a loss
    that the engine has not seen.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        collectives_of: Callable[[Bucket], Collectives],
        *,
        accumulate: torch.dtype | None,
        reduce: torch.dtype | None,
        mean_over: int = 1,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._replicas = group, replicas
        self._between_replicas: list[Any] = []
        self._fills: list[_Fill] = []
        self._collectives_of, self._accumulate, self._reduce = collectives_of, accumulate, reduce
        self._mean_over = mean_over
        self._places: dict[nn.Parameter, tuple[_Fill, Slot]] = {}
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self._on_the_way: deque[tuple[Bucket, Sum]] = deque()
        self._next = 0
        self._ready: list[_Fill] = []
        self._order_is_known = False
        self._is_open = False
        self._reduces = self._ends_step = True
        self.used: set[nn.Parameter] = set()
        self.when_made: Listener = lambda bucket: None
        self.when_reduced: Listener = lambda bucket: None
        self.when_unasked: Callable[[], None] = lambda: None
        self.host: HostGradients | None = None
        self.take(buckets)

    def take(self, buckets: Iterable[Bucket]) -> None:
        """Sum the gradients of these buckets too, and of what requires gradients by now in all others."""
        dtype, share = self._reduce, self._mean_over
        fills = [_Fill(bucket, self._collectives_of(bucket), dtype or bucket.dtype, share) for bucket in buckets]
        self._fills += reversed(fills)
        self._order_is_known = False
        for fill in self._fills:
            for slot in fill.bucket.slots:
                if slot.parameter.requires_grad and slot.parameter not in self._places:
                    self._places[slot.parameter] = fill, slot
                    hooked: Any = slot.parameter  # the method has no annotations
                    hooked.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self)))

    def sums(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's gradients are reduced."""
        return parameter in self._places

    def begin(self, *, reduces: bool, ends_step: bool = True) -> None:
        """Prepare a backward pass, whose gradients are summed over ranks or wait for a later one."""
        self._is_open, self._reduces, self._ends_step = True, reduces, ends_step
        self._next = 0
        self._ready = []
        for fill in self._fills:
            fill.restart()

    def take_gradients(self) -> None:
        """Take the gradients of a backward pass of weights alone, which are in `.grad` and called no hook."""
        for fill in self._fills:
            for slot in fill.bucket.slots:
                if slot.parameter in self._places and slot.parameter.grad is not None:
                    self._arrived(slot.parameter)

    def finish(self) -> None:
        """End a backward pass: send what some parameter without a gradient held back, and wait for all sums."""
        self._is_open = False
        if not self._reduces:
            return
        for fill in self._fills:
            for slot in [slot for slot in fill.bucket.slots if slot in fill.missing]:
                self._hand_over(fill, slot, None)
        while self._on_the_way:
            self._receive()
        for work in self._between_replicas:
            work.wait()
        self._between_replicas.clear()
        if not self._order_is_known:
            self._adopt_order()

    def settle(self) -> None:
        """Wait, before a step, for sums that are on their way to the host."""
        if self.host is not None:
            self.host.settle()

    @property
    def waiting(self) -> list[torch.Tensor]:
        """Whole gradients of earlier micro-batches, of parameters that have some."""
        return list(self._waiting.values())

    def forget(self, parameter: nn.Parameter) -> None:
        """Forget a parameter's gradient of micro-batches that were not reduced, and that it was used."""
        self._waiting.pop(parameter, None)
        self.used.discard(parameter)

    def clear(self) -> None:
        """Forget all gradients, after a step."""
        for fill in self._fills:
            fill.bucket.gradient = None
        self._waiting.clear()
        self.used.clear()

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient of this backward pass, which is complete."""
        fill, slot = self._places[parameter]
        if not self._is_open:
            self.when_unasked()
        if not self._is_open:
            return  # of another engine's backward pass through this model: the script's to clear, as in plain torch
        self.used.add(parameter)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._reduces:
            if slot not in fill.missing:
                raise CannotRun(
                    f"{slot.name} got a second gradient in one backward pass (reentrant checkpointing?); use"
                    " use_reentrant=False, or call backward once for each forward"
                )
            self._hand_over(fill, slot, gradient)
            return
        self._keep(parameter, gradient)

    def _keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient to those of earlier micro-batches that were not reduced."""
        before = self._waiting.get(parameter)
        if before is None:
            self._waiting[parameter] = gradient.to(self._accumulate or gradient.dtype)
        else:
            before.add_(gradient)

    def _hand_over(self, fill: _Fill, slot: Slot, gradient: torch.Tensor | None) -> None:
        accumulated = self._waiting.pop(slot.parameter, None)
        if accumulated is not None:
            gradient = accumulated if gradient is None else accumulated.add_(gradient)
        fill.take(slot, gradient)
        if fill.missing:
            return
        self.when_made(fill.bucket)
        self._ready.append(fill)
        while self._next < len(self._fills) and not self._fills[self._next].missing:
            self._send(self._fills[self._next])
            self._next += 1

    def _send(self, fill: _Fill) -> None:
        # One bucket is on the way while the next one fills: more would keep more gradients alive.
        while len(self._on_the_way) > 1:
            self._receive()
        with torch.profiler.record_function("dsplan::reduce"):
            self._on_the_way.append((fill.bucket, fill.collectives.reduce_scatter(fill.emptied(), fill.bucket.layout)))

    def _receive(self) -> None:
        bucket, pending = self._on_the_way.popleft()
        with torch.profiler.record_function("dsplan::sum"):
            if self.host is not None and bucket.states_at is not Place.DEVICE:
                total = pending.total(self.host.dtype_of(bucket))
                if self._replicas is not None:
                    dist.all_reduce(total, group=self._replicas)
                self.host.keep(bucket, total)
            else:
                total = pending.total(self._accumulate or bucket.dtype)
                bucket.gradient = total if bucket.gradient is None else bucket.gradient.add_(total)
                if self._replicas is not None and self._ends_step:
                    work = dist.all_reduce(bucket.gradient, group=self._replicas, async_op=True)
                    self._between_replicas.append(work)
        self.when_reduced(bucket)

    def _adopt_order(self) -> None:
        """Send from now on in the order in which the first backward pass of the first rank made the gradients."""
        numbers = {id(fill): number for number, fill in enumerate(self._fills)}
        order = on_rank_zero(lambda: [numbers[id(fill)] for fill in self._ready], self._group)
        self._fills = [self._fills[number] for number in order]
        self._order_is_known = True


class _Fill:
    """A bucket that gradients are put into."""

    def __init__(self, bucket: Bucket, collectives: Collectives, dtype: torch.dtype, mean_over: int) -> None:
        self.bucket, self.collectives, self._mean_over = bucket, collectives, mean_over
        self._dtype = dtype
        self._size = bucket.layout.padded if collectives.needs_padding else bucket.layout.elements
        self._buffer: torch.Tensor | None = None
        self.missing: set[Slot] = set(bucket.slots)

    def restart(self) -> None:
        self.missing = set(self.bucket.slots)

    def take(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Put in a parameter's gradient, None for zeros; the only one of a bucket becomes the buffer itself."""
        self.missing.discard(slot)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient is not None and self._mean_over > 1:
            gradient = gradient.div_(self._mean_over)
        if self.bucket.is_single and gradient is not None and gradient.numel() == self._size:
            self._buffer = gradient.reshape(-1).to(self._dtype)
            return
        if self._buffer is None:
            self._buffer = torch.empty(self._size, dtype=self._dtype, device=slot.parameter.device)
            self._buffer[self.bucket.layout.elements :].zero_()
        run = self._buffer[slot.start : slot.stop]
        if gradient is None:
            run.zero_()
        else:
            run.view(slot.parameter.shape).copy_(gradient)

    def emptied(self) -> torch.Tensor:
        """Release the full buffer and return it."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return buffer
