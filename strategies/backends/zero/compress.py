"""8-bit gradient compression with error feedback: what rounding leaves out of one sum goes into the next.

Every rank remembers what its rounding left out and adds it to the same gradients the next time (error feedback: Seide
et al. 2014), without which small gradients beside large ones would be rounded away in every step. A rank's own run
never travels and is never rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from strategies.backends.zero.collectives import Arrival, Collectives, Sum
from strategies.backends.zero.flat_shard import Bucket, Layout
from strategies.modules.compression import Codec

_ERROR_DTYPE = torch.bfloat16
"""An error is at most half a step of its block; 8 bits of it are exact enough, at half the memory of fp32."""


def collectives_factory(
    collectives_of: Callable[[Bucket], Collectives], codec: Codec | None, unit: Callable[[], float]
) -> Callable[[Bucket], Collectives]:
    """Return what makes a bucket's collectives: its own, or 8-bit ones around them; `unit` is the loss scale."""

    def make(bucket: Bucket) -> Collectives:
        collectives = collectives_of(bucket)
        if codec is None or collectives.ranks.world_size == 1:
            return collectives
        return EightBits(collectives, codec, unit)

    return make


class Memory:
    """Rounding errors of one bucket, run by run; `unit` is the loss scale of the moment, in which they are."""

    def __init__(self, codec: Codec, unit: Callable[[], float]) -> None:
        self._keeps, self._unit = codec.error_feedback, unit
        self._errors: dict[int, torch.Tensor] = {}
        self._recorded_in = unit()

    def restart(self) -> None:
        """Bring errors of another loss scale to this one, before a bucket is encoded."""
        now = self._unit()
        if now != self._recorded_in:
            for error in self._errors.values():
                error.mul_(now / self._recorded_in)
            self._recorded_in = now

    def of(self, run: int, values: torch.Tensor) -> torch.Tensor | None:
        """Return the error of a rank's run, zeros the first time, or None if errors are forgotten."""
        if not self._keeps:
            return None
        if run not in self._errors:
            self._errors[run] = torch.zeros_like(values, dtype=_ERROR_DTYPE)
        return self._errors[run]


class EightBits(Collectives):
    """The sums of one bucket over the ranks of other collectives, in 8 bits on the way."""

    def __init__(self, collectives: Collectives, codec: Codec, unit: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__(collectives.ranks, collectives.group)
        self._collectives, self._codec = collectives, codec
        self._memory = Memory(codec, unit)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        """Begin the all-gather, of whole weights."""
        return self._collectives.all_gather(whole, part, layout)

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Arrival:
        """Begin the exchange."""
        return self._collectives.all_to_all(outgoing, incoming)

    def reduce_scatter(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        """Send every owner its run in 8 bits, with what was left out of it the last time."""
        codec, ranks = self._codec, range(self.ranks.world_size)
        self._memory.restart()
        outgoing, incoming = [buffer.new_empty(0, dtype=torch.uint8) for _ in ranks], list[torch.Tensor]()
        first, last = layout.own
        for rank in ranks:
            is_here = rank == self.ranks.rank
            if not is_here:
                run = buffer[slice(*layout.bounds(rank))]
                outgoing[rank] = codec.encode(run, self._memory.of(rank, run))
            size = 0 if is_here else codec.message_bytes(last - first)
            incoming.append(buffer.new_empty(size, dtype=torch.uint8))
        # A copy, so that the buffer is free as soon as it is encoded.
        own = codec.room(last - first, buffer)
        own[: last - first].copy_(buffer[first:last])
        return _Decoded(codec, (own, last - first), (outgoing, incoming), self.all_to_all(outgoing, incoming))


class _Decoded:
    """A rank's own run, in a `room`, to which what the others send is added; what is sent is kept until then."""

    def __init__(
        self,
        codec: Codec,
        own: tuple[torch.Tensor, int],
        messages: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        arrival: Arrival,
    ) -> None:
        self._codec, self._messages, self._arrival = codec, messages, arrival
        self._room, self._elements = own

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        self._arrival.wait()
        for message in self._messages[1]:
            if message.numel():
                self._codec.add(message, self._room)
        return self._room[: self._elements].to(dtype)
