"""Offload of our own ZeRO: the same training wherever states live, copies beside compute, nothing left on a disk."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from strategies.backends.zero.nvme import Shelf, SwapFile
from strategies.backends.zero.offload import OffloadRatio
from strategies.errors import CannotRun
from strategies.telemetry.memory_report import on_disk
from tests.strategies import offload_bodies, training_bodies, zero_bodies
from tests.strategies.offload_bodies import How
from tests.strategies.training_bodies import Recipe

STAGES = ("zero1", "zero2", "zero3")
PLACES = [*product(STAGES, ("optimizer", "nvme")), ("zero3", "all")]
Events = list[tuple[str, float, float]]


def how(strategy: str, offload: str, directory: Path, *, ratio: float = 1.0, apart: bool = True, **more: object) -> How:
    recipe = Recipe(strategy=strategy, backend="native", world_size=2, offload=offload, **more)  # type: ignore[arg-type]
    return How(recipe=recipe, directory=str(directory), ratio=ratio, apart=apart)


def assert_equal(learned: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert learned.keys() == expected.keys()
    for name, value in expected.items():
        assert (learned[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize(("strategy", "offload"), PLACES)
@pytest.mark.sweep(every=6)
def test_training_is_the_same_wherever_states_live(
    strategy: str, offload: str, ratio: float, ranks: RankPool, tmp_path: Path
) -> None:
    run = how(strategy, offload, tmp_path, ratio=ratio, accumulation=3, clipping=0.5)
    expected = training_bodies.reference(run.recipe)
    for trained in ranks.run(offload_bodies.train, run):
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_equal(trained.parameters, expected.parameters)
        away = {"nvme": "disk"}.get(offload, "host")
        assert set(trained.places) == ({away} if ratio == 1 else {away, "device"})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("strategy", "offload"), PLACES)
@pytest.mark.sweep(every=6, suite=lambda accumulation: accumulation == 2)
def test_not_a_bit_is_lost_on_the_way(
    strategy: str, offload: str, accumulation: int, ranks: RankPool, tmp_path: Path
) -> None:
    """bf16 weights and gradients, fp32 masters: fused AdamW does on the host what the loop over tensors does."""
    more = {"precision": "bf16", "accumulation": accumulation}
    stays = ranks.run(offload_bodies.train, how(strategy, "none", tmp_path, **more))[0]
    away = ranks.run(offload_bodies.train, how(strategy, offload, tmp_path, **more))[0]
    assert away.losses == pytest.approx(stays.losses, rel=1e-6)
    for name, value in stays.parameters.items():
        assert torch.equal(away.parameters[name], value), name


def test_nvme_where_the_device_is_the_host(ranks: RankPool, three_ranks: RankPool, tmp_path: Path) -> None:
    for pool in (ranks, three_ranks):
        run = how("zero3", "nvme", tmp_path, apart=False)
        run = replace(run, recipe=replace(run.recipe, world_size=pool.world_size))
        assert_equal(
            pool.run(offload_bodies.train, run)[1].parameters, training_bodies.reference(run.recipe).parameters
        )


@pytest.mark.parametrize("optimizer", zero_bodies.OPTIMIZERS)
@pytest.mark.parametrize("offload", ["optimizer", "nvme"])
@pytest.mark.sweep(every=6)
def test_any_optimizer(offload: str, optimizer: str, ranks: RankPool, tmp_path: Path) -> None:
    """States that come late, of parameters unused at first, find their place too."""
    recipe = zero_bodies.OddRecipe(strategy="zero2", optimizer=optimizer)
    for learned in ranks.run(offload_bodies.train_odd, how("zero2", offload, tmp_path), optimizer):
        assert_equal(learned, zero_bodies.reference_odd(recipe))


def test_a_count_of_steps_that_a_group_keeps_goes_up_once_in_a_step(ranks: RankPool, tmp_path: Path) -> None:
    stays = ranks.run(offload_bodies.counted, how("zero2", "none", tmp_path))[0]
    for offload, ratio in (("optimizer", 1.0), ("nvme", 0.5)):
        count, weights = ranks.run(offload_bodies.counted, how("zero2", offload, tmp_path, ratio=ratio))[0]
        assert count == stays[0] == 5
        assert_equal(weights, stays[1])


def _named(events: Events, name: str) -> Events:
    return sorted((event for event in events if event[0] == name), key=lambda event: event[1])


def _overlap(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
    return one[1] < other[2] and other[1] < one[2]


def test_a_trace_shows_copies_beside_backward_and_beside_the_step(ranks: RankPool, tmp_path: Path) -> None:
    events = ranks.run(offload_bodies.copies_in_a_trace, how("zero2", "optimizer", tmp_path))[0]
    down, up, steps = (_named(events, f"dsplan::{name}") for name in ("gradients_down", "weights_up", "step_on_host"))
    computed = sorted(begin for name, begin, _ in events if "AccumulateGrad" in name)
    assert len(down) == len(up) == len(steps) == 4
    assert down[0][1] < computed[-1], "the first gradient goes down before the last is made"
    for bucket in range(3):
        assert _overlap(up[bucket], steps[bucket + 1]), "weights return while the next bucket is stepped"


def test_a_trace_shows_the_disk_beside_the_step(ranks: RankPool, tmp_path: Path) -> None:
    events = ranks.run(offload_bodies.disk_in_a_trace, how("zero2", "nvme", tmp_path, apart=False))[0]
    reads, writes, steps = (
        _named(events, f"dsplan::{name}") for name in ("read_states", "write_states", "step_on_host")
    )
    assert len(reads) == len(writes) == len(steps) == 4
    for bucket in range(3):
        assert _overlap(reads[bucket + 1], steps[bucket]), "the next states are read while one bucket is stepped"
        assert _overlap(writes[bucket], steps[bucket + 1]), "states are written while the next bucket is stepped"


@pytest.mark.parametrize(("strategy", "offload"), [("zero1", "optimizer"), ("zero3", "all"), ("zero3", "nvme")])
def test_evaluation_and_changes(strategy: str, offload: str, ranks: RankPool, tmp_path: Path) -> None:
    for evaluated, inside, changed in ranks.run(offload_bodies.evaluated_and_changed, how(strategy, offload, tmp_path)):
        assert evaluated == pytest.approx(inside, rel=1e-6)
        assert changed == [0.25]


def test_checkpoints_continue_with_and_without_offload(ranks: RankPool, tmp_path: Path) -> None:
    nvme, stays = how("zero3", "nvme", tmp_path), how("zero1", "none", tmp_path)
    for saver, loader in ((nvme, nvme), (nvme, stays), (stays, nvme)):
        folder = str(tmp_path / f"{saver.recipe.offload}-{loader.recipe.offload}")
        expected = ranks.run(offload_bodies.save_and_go_on, saver, folder)[0]
        assert ranks.run(offload_bodies.load_and_go_on, loader, folder)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("strategy", "precision"), [*product(("zero2", "zero3"), ("fp32", "bf16"))])
@pytest.mark.sweep(
    every=2, suite=lambda strategy, precision: (strategy, precision) in (("zero2", "fp32"), ("zero3", "bf16"))
)
def test_live_bytes_fall_by_masters_and_moments(strategy: str, precision: str, ranks: RankPool, tmp_path: Path) -> None:
    """Weights alone stay in memory: all of them in stage 2, half of them on each of two ranks in stage 3. States too
    small for a place in the file, and the steps' counts, take 64 KiB, where masters and moments would be 8 to 13 MB."""
    run = how(strategy, "nvme", tmp_path, apart=False, precision=precision)
    width = 2 if precision == "bf16" else 4
    for live, elements in ranks.run(offload_bodies.live_between_steps, run):
        assert live == pytest.approx(width * elements / (1 if strategy == "zero2" else 2), abs=2**16)


def test_nothing_is_left_on_the_disk(ranks: RankPool, tmp_path: Path) -> None:
    for names, taken, size, is_readable in ranks.run(offload_bodies.on_disk, how("zero2", "nvme", tmp_path)):
        assert names == []
        assert taken >= size > 2**20, "the states are there all the same"
        assert is_readable


def test_a_disk_without_room_is_named(ranks: RankPool, tmp_path: Path) -> None:
    expected = r"no room for .* more of optimizer states, .* are free; free some, or name another disk"
    with pytest.raises(RankError, match=expected):
        ranks.run(offload_bodies.full_disk, how("zero2", "nvme", tmp_path), 2**20)


def test_a_directory_that_cannot_be_used_is_named_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for absent in (tmp_path / "file" / "below", tmp_path / "mistyped"):
        with pytest.raises(CannotRun, match=r"optimizer states cannot be put there .*; name a directory that is there"):
            SwapFile(absent)
    assert not (tmp_path / "mistyped").exists()


def test_a_shelf_holds_tensors_of_all_kinds(tmp_path: Path) -> None:
    shelf = Shelf(SwapFile(tmp_path))
    first = {"a": torch.randn(7, 3), "b": torch.arange(5, dtype=torch.uint8)}
    later = {"c": torch.randn(11, dtype=torch.float64).t(), "d": torch.randn(3, 4).t()}
    for tensors in (first, later):
        shelf.add(tensors)
    memory = shelf.read(shelf.room())
    for name, value in (first | later).items():
        assert torch.equal(shelf.mapped(name), value)
        assert torch.equal(shelf.view(name, memory), value)
        assert on_disk(shelf.mapped(name))
        assert not on_disk(shelf.view(name, memory))
    shelf.view("a", memory).fill_(2)
    shelf.mapped("d").fill_(3)
    shelf.write(memory)
    assert shelf.mapped("a").unique().tolist() == [2]
    assert torch.equal(shelf.mapped("d"), later["d"]), "what was read before is written over it"
    assert not shelf.holds("a", torch.zeros(7, 4))


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_share_is_met_to_half_a_bucket(ratio: float) -> None:
    share, sizes = OffloadRatio(ratio), [16, 16, 40, 16, 16, 3, 16, 16, 16, 16, 16, 16]
    taken = sum(size for size in sizes if share.takes(size))
    assert abs(taken - ratio * sum(sizes)) <= max(sizes) / 2
