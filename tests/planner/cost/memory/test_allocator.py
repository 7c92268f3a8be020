"""The simulated caching allocator: `tests/emulated_cuda/test_device.py` asks the emulated card the same."""

from __future__ import annotations

import pytest

from hardware_db.units import MIB
from planner.cost.memory.allocator import CachingAllocator, Free, Mark, Peak, Replay, Request


# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is left is no more than a MiB: not split off
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_a_request_takes_what_the_caching_allocator_gives(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.request(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_freed_neighbours_serve_a_larger_request_of_their_stream_alone() -> None:
    allocator = CachingAllocator()
    first, second = allocator.request(4 * MIB), allocator.request(5 * MIB)
    allocator.release(first)
    allocator.release(second)
    assert allocator.request(9 * MIB).address == first.address
    assert allocator.reserved == 20 * MIB
    allocator.request(4 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.request(size * MIB) for size in (12, 10, 14)]
    for block in blocks:
        allocator.release(block)
    assert allocator.request(10 * MIB - 512).address == blocks[1].address


def test_segments_that_nothing_uses_go_back() -> None:
    allocator = CachingAllocator()
    kept, freed = allocator.request(4 * MIB), allocator.request(40 * MIB)
    beside = allocator.request(4 * MIB)
    allocator.release(freed)
    allocator.release(beside)
    allocator.clear()
    assert allocator.reserved == 20 * MIB
    allocator.release(kept)
    allocator.clear()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_a_phase_has_the_peaks_between_its_marks_and_what_was_there_before() -> None:
    replay = Replay()
    replay.run([Request("weights", 12 * MIB), Mark("load"), Request("kept", 30), Request("gone", 700), Free("gone")])
    replay.run([Mark("forward"), Free("kept"), Mark("step")])
    assert replay.peaks == {
        "load": Peak(requested=12 * MIB, allocated=12 * MIB, reserved=12 * MIB),
        "forward": Peak(requested=12 * MIB + 730, allocated=12 * MIB + 1536, reserved=14 * MIB),
        "step": Peak(requested=12 * MIB + 30, allocated=12 * MIB + 512, reserved=14 * MIB),
    }
