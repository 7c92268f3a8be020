"""torch's caching allocator, without the memory: what it allocates and reserves for a sequence of requests and frees.

Source: torch 2.13's `c10/cuda/CUDACachingAllocator.cpp` with its default settings. A request is rounded up to 512
bytes and served from the smallest free block of its stream that is large enough, of those for small requests (to 1 MiB)
or those for large ones; without one a segment is taken from the device. What is left of a block becomes a free block of
its own where it is worth that, and else counts as allocated; freed neighbours of a segment become one. Of free blocks
of one size the lowest address is taken; new segments are taken to lie above older ones, which is up to the driver.

The sources of shares stand in docs/explanation/cost-model.md by the numbers in brackets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hardware_db.units import MIB
from planner.cost.memory.units import ALLOCATION_BYTES, round_up

_SMALL_BYTES = MIB
"""Requests up to it come from segments of their own (kSmallSize); more than it must be left to split a large block."""
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_LARGE_REQUEST = 10 * MIB
"""Requests from it on have a segment of their own size (kMinLargeAlloc), in steps of 2 MiB (kRoundLarge)."""
SEGMENT_BYTES = _SMALL_SEGMENT + _LARGE_SEGMENT
"""A segment for small blocks and one of those up to 10 MiB: what the smallest process reserves."""
FRAGMENTATION = 0.05
"""Share of the allocated bytes that no request fits into: what compressed-tensors keeps free [3]."""
LEFT_WHEN_SHORT = 0.024
"""The same at the least: what was left when a 79 GiB device ran out [3]."""
CACHE = {"fsdp": 0.20, "zero": 0.10, "replica": 0.08}
"""Reserved over allocated while memory is plentiful [3]: FSDP, whose gathers and reductions have streams and so block
pools of their own, 0.19 to 0.62 in nine reports; ZeRO 0.15, one 0.11 to 0.12 for one process. The allocator gives these
blocks back before a request fails, so that they do not count as needed."""


class Request(NamedTuple):
    """A request for `size` bytes on a stream, by the name of what it is for."""

    name: Hashable
    size: int
    stream: int = 0


class Free(NamedTuple):
    """The end of what was requested under a name."""

    name: Hashable


class Mark(NamedTuple):
    """A moment: `name` is the phase that ends with it, `clears` whether unused segments go back to the device."""

    name: str = ""
    clears: bool = False


Event: TypeAlias = Request | Free | Mark


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    is_small: bool
    stream: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


_Key: TypeAlias = tuple[int, int]
_Pool: TypeAlias = list[tuple[_Key, _Block]]


class CachingAllocator:
    """One device's allocator, which has all the room it asks for. All sizes in bytes.

    `allocated` are the blocks in use, `reserved` the segments.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._segments = 0

    def request(self, size: int, stream: int = 0) -> _Block:
        """Return a block of at least `size` bytes; `release` takes it back."""
        size = max(round_up(size), ALLOCATION_BYTES)
        is_small = size <= _SMALL_BYTES
        pool = self._pools.setdefault((is_small, stream), [])
        at = bisect_left(pool, (size, -1), key=lambda entry: entry[0])
        block = pool.pop(at)[1] if at < len(pool) else self._segment(size, is_small=is_small, stream=stream)
        left = block.size - size
        if left >= ALLOCATION_BYTES if is_small else left > _SMALL_BYTES:
            rest = _Block(block.address + size, left, is_small, stream, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.is_free = False
        self.allocated += block.size
        return block

    def release(self, block: _Block) -> None:
        """Take a block back and join it with what is free beside it."""
        self.allocated -= block.size
        if (after := block.after) is not None and after.is_free:
            self._take(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        if (before := block.before) is not None and before.is_free:
            self._take(before)
            before.size, before.after = before.size + block.size, block.after
            if before.after is not None:
                before.after.before = before
            block = before
        self._put(block)

    def clear(self) -> None:
        """Give unused segments back to the device, as `torch.cuda.empty_cache` does."""
        for key, pool in self._pools.items():
            whole = [block for _, block in pool if block.before is None and block.after is None]
            self.reserved -= sum(block.size for block in whole)
            gone = set(map(id, whole))
            self._pools[key] = [entry for entry in pool if id(entry[1]) not in gone]

    def _segment(self, size: int, *, is_small: bool, stream: int) -> _Block:
        if is_small:
            taken = _SMALL_SEGMENT
        else:
            taken = _LARGE_SEGMENT if size < _LARGE_REQUEST else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += taken
        self._segments += 1
        return _Block(self._segments << 44, taken, is_small, stream)

    def _put(self, block: _Block) -> None:
        block.is_free = True
        pool = self._pools.setdefault((block.is_small, block.stream), [])
        insort(pool, ((block.size, block.address), block), key=lambda entry: entry[0])

    def _take(self, block: _Block) -> None:
        pool = self._pools[block.is_small, block.stream]
        del pool[bisect_left(pool, (block.size, block.address), key=lambda entry: entry[0])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most bytes of a phase, each at its own moment; `reserved` at its end."""

    requested: int = 0
    allocated: int = 0
    reserved: int = 0

    def beside(self, other: Peak) -> Peak:
        """Return the larger of both in each."""
        return Peak(
            requested=max(self.requested, other.requested),
            allocated=max(self.allocated, other.allocated),
            reserved=max(self.reserved, other.reserved),
        )


class Replay:
    """An allocator that is given events, and takes down what each phase needs at most."""

    def __init__(self) -> None:
        self.peaks: dict[str, Peak] = {}
        self._allocator = CachingAllocator()
        self._blocks: dict[Hashable, tuple[_Block, int]] = {}
        self._requested = self._most_requested = self._most = 0

    def run(self, events: Iterable[Event]) -> None:
        """Let one event after the other happen."""
        for event in events:
            if isinstance(event, Request):
                self._request(event)
            elif isinstance(event, Free):
                block, size = self._blocks.pop(event.name)
                self._allocator.release(block)
                self._requested -= size
            else:
                self._mark(event)

    def _request(self, event: Request) -> None:
        self._blocks[event.name] = self._allocator.request(event.size, event.stream), event.size
        self._requested += event.size
        self._most = max(self._most, self._allocator.allocated)
        self._most_requested = max(self._most_requested, self._requested)

    def _mark(self, event: Mark) -> None:
        peak = Peak(requested=self._most_requested, allocated=self._most, reserved=self._allocator.reserved)
        self.peaks[event.name] = peak.beside(self.peaks.get(event.name, Peak()))
        if event.clears:
            self._allocator.clear()
        self._most, self._most_requested = self._allocator.allocated, self._requested
