"""The storage tracker against sums done by hand, torch's own memory profiler, and what it must restore."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.checkpoint.safefile import bytes_of
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe

SQUARE = 64 * 64 * 4  # bytes of a 64 x 64 fp32 matrix, a multiple of the 512-byte rounding


def test_live_and_peak_of_a_few_products() -> None:
    weight = torch.randn(64, 64)
    with StorageTracker([weight]) as tracker:
        first = weight @ weight
        assert (tracker.live_bytes, tracker.peak_bytes) == (2 * SQUARE, 2 * SQUARE)
        second = first + 1
        del first
        assert (tracker.live_bytes, tracker.peak_bytes) == (2 * SQUARE, 3 * SQUARE)
        second.add_(1)
        second.t()[:10].unsqueeze(0)
        assert tracker.peak_bytes == 3 * SQUARE, "views and in-place operations take no memory"


def test_what_is_first_written_to_counts_from_the_start() -> None:
    """DDP's buckets live in C++ and are met when gradients are copied into them."""
    hidden = torch.randn(64, 64)
    with StorageTracker() as tracker:
        temporary = torch.zeros(64, 64)
        del temporary
        assert tracker.peak_bytes == SQUARE
        hidden.mul_(2)
        assert tracker.peak_bytes == 2 * SQUARE, "it was there next to the temporary"
        assert tracker.live_bytes == SQUARE


def test_what_is_first_read_counts_from_then_on() -> None:
    """The flat inputs of collectives are made where no mode sees it, used once, and freed."""
    made_elsewhere = torch.randn(64, 64)
    with StorageTracker() as tracker:
        temporary = torch.zeros(64, 64)
        del temporary
        made_elsewhere.t()
        assert tracker.peak_bytes == SQUARE
        assert tracker.live_bytes == SQUARE


def test_what_a_checkpoint_was_loaded_into_or_saved_from_counts() -> None:
    """The bytes of resumed weights and moments were read in place; the run holds them all the same."""
    loaded = torch.zeros(64, 64)
    saved = bytes_of(loaded)
    saved[:4] = b"\x00\x00\x80\x3f"
    assert loaded[0, 0] == 1.0, "without a copy"
    with StorageTracker() as tracker:
        loaded.mul_(2)
        assert tracker.live_bytes == SQUARE
    del loaded
    assert bytes(saved[:4]) == b"\x00\x00\x00\x40", "who looks at the bytes keeps them"


def test_what_torch_has_loaded_counts_once_it_is_written_to(tmp_path: Path) -> None:
    """A resumed optimizer steps the very tensors that `torch.load` has read; what is only read may be a mapped file."""
    torch.save([torch.zeros(64, 64), torch.zeros(64, 64)], tmp_path / "states.pt")
    moment, table = torch.load(tmp_path / "states.pt")
    with StorageTracker([table]) as tracker:
        temporary = torch.zeros(64, 64)
        del temporary
        torch._foreach_add_([moment], [table])
        assert tracker.peak_bytes == 2 * SQUARE, "it was there next to the temporary"
        assert tracker.live_bytes == SQUARE


def test_resized_storages_are_followed_and_the_method_is_given_back() -> None:
    original = torch.UntypedStorage.resize_
    gathered = torch.zeros(64, 64)
    with StorageTracker([gathered]) as tracker:
        gathered.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        gathered.untyped_storage().resize_(SQUARE)
        assert tracker.live_bytes == tracker.peak_bytes == SQUARE
    assert torch.UntypedStorage.resize_ is original


def test_a_training_step_agrees_with_the_profiler() -> None:
    """The profiler counts allocations where they are made, in C++; both must see the same peak of a step."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(128, 256)

    def step() -> None:
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    resident = 3 * parameters + inputs.numel() * inputs.element_size()
    with StorageTracker() as tracker:
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    above = peak = 0
    for _, size in sorted(events):
        above += size
        peak = max(peak, above)
    assert peak > parameters
    assert tracker.peak_bytes == pytest.approx(resident + peak, rel=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_stays_alive_between_steps(strategy: str, ranks: RankPool) -> None:
    """Of each parameter the value and two moments, under FSDP half of each; DDP's buckets hold all gradients too."""
    live, peak, sizes = ranks.run(training_bodies.tracked_step, Recipe(strategy=strategy, world_size=2))[0]
    parts = [shape if strategy == "ddp" else (-(-shape[0] // 2), *shape[1:]) for shape in sizes]
    states = sum(3 * rounded(4 * math.prod(part)) + rounded(4) for part in parts)  # Adam counts steps per parameter
    buckets = sum(4 * math.prod(shape) for shape in sizes) if strategy == "ddp" else 0
    assert live == pytest.approx(states + buckets, rel=0.03)
    assert peak > live + sum(4 * math.prod(part) for part in parts), "gradients and activations come on top"


def rounded(size: int) -> int:
    return -(-size // 512) * 512
