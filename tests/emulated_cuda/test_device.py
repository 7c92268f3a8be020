"""The emulated device behaves as a card: the allocator's rules, streams, errors, numbers and collectives."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest

from planner.cost.memory.allocator import CachingAllocator
from tests.emulated_cuda import device_bodies as bodies
from tests.emulated_cuda.fixtures import CardPool

pytestmark = pytest.mark.usefixtures("emulated")

MIB = 1 << 20


# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is left is no more than a MiB: not split off
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_a_tensor_takes_what_the_caching_allocator_gives(
    card: CardPool, size: int, allocated: int, reserved: int
) -> None:
    assert card.run(bodies.reserved_for, [size]) == [[(allocated, reserved)]]


def test_blocks_are_split_merged_and_used_again(card: CardPool) -> None:
    assert card.run(bodies.story_of_blocks) == [
        {
            "two of a segment": 20 * MIB,
            "beside": 4 * MIB,
            "a segment in use stays": 20 * MIB,
            "the freed one is used again": True,
            "merged": (True, 20 * MIB),
            "a remainder of over a MiB is split off": 20 * MIB,
            "empty": (0, 0),
        }
    ]


def test_the_planners_allocator_gives_the_same(card: CardPool) -> None:
    draw, alive, events = random.Random(25), list[int](), list[tuple[int, int]]()
    for number in range(600):
        if alive and draw.random() < 0.45:
            events.append((alive.pop(draw.randrange(len(alive))), 0))
        else:
            alive.append(number)
            events.append((number, round(2 ** draw.uniform(4, 24))))
    allocator, blocks, answers = CachingAllocator(), {}, []
    for number, size in events:
        if size:
            blocks[number] = allocator.request(size)
        else:
            allocator.release(blocks.pop(number))
        answers.append((allocator.allocated, allocator.reserved))
    assert card.run(bodies.history_of_blocks, events) == [answers]


def test_running_out_is_an_error_after_which_the_card_works(card: CardPool) -> None:
    [answer] = card.run(bodies.running_out)
    assert answer["retries"] == 1
    assert answer["sum"] == 1000.0
    assert answer["text"].startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 2.00 GiB of which " in answer["text"]
    assert " allowed; " in answer["limited"]


def test_expandable_segments_grow_by_twenty_mib(card: CardPool) -> None:
    assert card.run(bodies.expandable) == [
        {"first": 20, "second": 60, "beside": True, "its middle stays": 60, "numbers stay": True, "empty": 0}
    ]


def test_a_block_that_another_stream_reads_is_kept_from_reuse(card: CardPool) -> None:
    assert card.run(bodies.reuse_after_another_stream, True) == [False]


def test_streams_and_copies_take_effect_when_they_are_waited_for(card: CardPool) -> None:
    [answer] = card.run(bodies.streams_and_copies)
    assert "reads memory that stream 0 of cuda:0 writes, and has not waited for it" in answer.pop("read too soon")
    assert "has not waited for it" in answer.pop("used too soon")
    assert answer == {
        "fresh event": True,
        "not done at once": False,
        "sum": 1000 * 999 + 1000,
        "done": True,
        "a source that changes under way": [9.0] * 4,
        "not there yet": True,
        "there": [9.0] * 4,
        "pageable": [9.0] * 4,
        "other device": 1,
    }


def test_devices_are_not_mixed(card: CardPool) -> None:
    [[host, other, linear, allowed]] = card.run(bodies.mixed_devices)
    assert host.startswith(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"
    )
    assert "cuda:0 and cuda:1" in other
    assert linear.startswith("Expected all tensors to be on the same device")
    assert allowed == ""


def test_generators_are_of_the_card(card: CardPool) -> None:
    [answer] = card.run(bodies.random_numbers)
    assert 400 < answer.pop("dropped") < 600
    assert answer == {
        "state bytes": 16,
        "repeats": True,
        "moves on": True,
        "the host's is untouched": True,
        "own": True,
    }


def test_what_was_saved_is_read_to_a_card(card: CardPool) -> None:
    assert card.run(bodies.loading) == [["cuda:1", "cpu", "cuda:0", "cuda:0"]]


@pytest.mark.parametrize("mode", ["plain", "foreach", "fused"])
@pytest.mark.sweep(every=3)
def test_losses_are_those_of_the_cpu(card: CardPool, mode: str) -> None:
    [on_card], [on_cpu] = card.run(bodies.losses, "cuda", mode), card.run(bodies.losses, "cpu", mode)
    assert on_card == pytest.approx(on_cpu, rel=1e-6)
    assert on_card[-1] < on_card[0]


def test_autocast_computes_in_the_lower_precision(card: CardPool) -> None:
    [lower], [full] = card.run(bodies.losses, "cuda", "autocast"), card.run(bodies.losses, "cuda", "plain")
    assert lower != full
    assert lower == pytest.approx(full, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        ("bfloat16", False, "ScaledDotProductFlashAttentionBackward0"),
        ("float32", True, "ScaledDotProductEfficientAttentionBackward0"),
    ],
)
def test_attention_takes_the_fused_kernels_with_the_cpus_numbers(
    card: CardPool, dtype: str, masked: bool, kernel: str
) -> None:
    [[name, *on_card]] = card.run(bodies.attention, "cuda", dtype, masked)
    [[_, *on_cpu]] = card.run(bodies.attention, "cpu", dtype, masked)
    assert name == kernel
    for one, other in zip(on_card, on_cpu, strict=True):
        numpy.testing.assert_allclose(one, other, rtol=2e-2 if dtype == "bfloat16" else 1e-6, atol=2e-2)


def test_sums_of_products_are_given_out_wider(card: CardPool) -> None:
    for dtype, error in card.run(bodies.wide_products)[0]:
        assert dtype == "torch.float32"
        assert error < 1e-5


def _expected(rank: int) -> list[Any]:
    both = [2 * i + 10.0 for i in range(4)]
    first, second = [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]
    part = [2.0 * (2 * rank + i) + 10.0 for i in range(2)]
    exchanged = [2.0 * rank, 2.0 * rank + 1, 10.0 + 2 * rank, 11.0 + 2 * rank]
    received = [10.0 * (1 - rank), 10.0 * (1 - rank) + 1]
    return [
        *(both, [value / 2 for value in both], first, first + second, first, second, part, exchanged, received, both),
        *([True], [{"rank": 0}, {"rank": 1}]),
    ]


def test_collectives_of_the_group_called_nccl(two_cards: CardPool) -> None:
    assert two_cards.run(bodies.collectives, "cuda") == [_expected(0), _expected(1)]


def test_a_collective_that_is_not_waited_for_is_seen(two_cards: CardPool) -> None:
    for message in two_cards.run(bodies.read_before_wait):
        assert "aten::sum on stream 0" in message
        assert "has not waited for it" in message


def test_processes_share_a_card(two_cards: CardPool) -> None:
    for free, after in two_cards.run(bodies.own_use):
        assert free - after == pytest.approx(128 * MIB, abs=1 << 16)
