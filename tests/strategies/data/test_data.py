"""Samples that a rank gets: together ranks see every sample once, in the same global batches whatever the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from strategies.config.values import DataSection
from strategies.data.loader import LoaderSettings, ShardedLoader
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun
from tests.strategies import engine_bodies, training_bodies
from tests.strategies.training_bodies import Recipe


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def handed_out(loader: ShardedLoader, most: int | None = None) -> list[list[int]]:
    """Up to `most` micro-batches that an engine trains on."""
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        loader.trained()
        if len(batches) == most:
            break
    return batches


def global_batches(samples: int, world: int, accumulation: int, epochs: int = 1) -> list[set[int]]:
    """The samples of every optimizer step, over all ranks."""
    configuration = Recipe(strategy="ddp", world_size=world, accumulation=accumulation).plan().configuration
    per_rank: list[list[Sequence[int]]] = []
    for rank in range(world):
        # The seed is rank 0's where there are several ranks; here every rank is this process.
        environment = Environment(
            rank=rank, local_rank=rank, world_size=world, local_world_size=world, device=torch.device("cpu")
        )
        loader = ShardedLoader(
            Numbers(samples), configuration, environment, LoaderSettings(section=DataSection(seed=7))
        )
        batches = [batch for _ in range(epochs) for batch in handed_out(loader)]
        assert len(batches) == epochs * len(loader)
        per_rank.append([list(chain(*batches[i : i + accumulation])) for i in range(0, len(batches), accumulation)])
    return [set().union(*parts) for parts in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 3), (2, 1), (2, 3), (4, 1), (6, 2)])
def test_steps_see_the_same_samples_under_every_plan(world: int, accumulation: int) -> None:
    assert global_batches(61, world, accumulation, epochs=2) == global_batches(61, 1, 1, epochs=2)


def test_an_epoch_holds_every_sample_once_and_the_next_is_another_order() -> None:
    batches = global_batches(60, 2, 3, epochs=2)
    first, second = batches[:5], batches[5:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(60))
    assert first != second


def test_samples_that_fill_no_global_batch_are_left_out() -> None:
    assert len(global_batches(35, 2, 3)) == 2


def test_the_scripts_seed_decides_the_order() -> None:
    configuration = Recipe().plan().configuration
    alone = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))

    def order(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return [batch.tolist() for batch in ShardedLoader(Numbers(60), configuration, alone)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def loader_of(world: int, rank: int, *, samples: int = 61, accumulation: int = 1, **how: Any) -> ShardedLoader:
    configuration = Recipe(strategy="ddp", world_size=world, accumulation=accumulation).plan().configuration
    environment = Environment(
        rank=rank, local_rank=rank, world_size=world, local_world_size=world, device=torch.device("cpu")
    )
    dataset = how.pop("dataset", None) or Numbers(samples)
    return ShardedLoader(dataset, configuration, environment, LoaderSettings(section=DataSection(**{"seed": 7, **how})))


@pytest.mark.parametrize(("before", "after"), [((2, 1), (3, 1)), ((3, 2), (1, 1)), ((1, 3), (4, 1)), ((4, 1), (2, 3))])
@pytest.mark.parametrize("stop", [1, 3, 5], ids=["early", "late", "after the last step"])
def test_a_resumed_run_sees_the_rest_of_the_epoch(before: tuple[int, int], after: tuple[int, int], stop: int) -> None:
    """No sample is lost or seen twice, whatever the number of ranks before and after."""
    world, accumulation = before
    seen: list[int] = []
    states = []
    for rank in range(world):
        loader = loader_of(world, rank, accumulation=accumulation, num_workers=1 if rank == 0 and stop == 1 else 0)
        seen += chain(*handed_out(loader, most=stop * accumulation))
        states.append(loader.state_dict())
    assert all(state == states[0] == json.loads(json.dumps(state)) for state in states), "the same on every rank"
    world, accumulation = after
    following: list[int] = []
    for rank in range(world):
        loader = loader_of(world, rank, accumulation=accumulation, seed=99)
        loader.load_state_dict(states[0])
        seen += chain(*handed_out(loader))
        following += chain(*handed_out(loader))
    first, second = global_batches(61, 1, 1, epochs=2)[:5], global_batches(61, 1, 1, epochs=2)[5:]
    assert sorted(seen) == sorted(chain(*first))
    assert sorted(following) == sorted(chain(*second))


def test_what_workers_read_ahead_is_not_trained_on() -> None:
    loader = loader_of(1, 0, num_workers=2)
    batches = iter(loader)
    first = next(batches).tolist()
    loader.trained()
    second = next(batches).tolist()
    assert loader.state_dict()["samples"] == 12, "the second batch was handed out and not trained on"
    other = loader_of(1, 0)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other)).tolist() == second != first


def test_a_glance_at_the_data_costs_no_sample() -> None:
    loader = loader_of(1, 0)
    glance = next(iter(loader)).tolist()
    assert handed_out(loader)[0] == glance
    assert loader.epoch == 1


def test_a_loop_that_was_left_is_followed_by_the_next_epoch() -> None:
    loader = loader_of(1, 0)
    handed_out(loader, most=2)
    assert sorted(chain(*handed_out(loader))) == sorted(chain(*global_batches(61, 1, 1, epochs=2)[5:]))


def test_another_dataset_is_refused() -> None:
    loader = loader_of(1, 0, samples=61)
    with pytest.raises(CannotRun, match="in 61 samples and training_data has 70"):
        loader_of(1, 0, samples=70).load_state_dict(loader.state_dict())


class Damaged(Numbers):
    """Numbers, of which three cannot be read."""

    bad = (4, 5, 60)

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"no sample {index}")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_read_are_replaced_by_the_next(workers: int) -> None:
    sound = handed_out(loader_of(1, 0))
    loader = loader_of(1, 0, dataset=Damaged(61), bad_samples=3, num_workers=workers)
    with pytest.warns(UserWarning, match="is left out"):
        damaged = handed_out(loader)
    replaced = {4: 6, 5: 6, 60: 0}
    assert damaged == [[replaced.get(number, number) for number in batch] for batch in sound]
    met = {number for batch in sound for number in batch} & set(Damaged.bad)
    assert loader.bad_samples == len(met | ({5} if 4 in met else set())) >= 2


def test_the_sample_beyond_the_limit_is_named() -> None:
    with (
        pytest.warns(UserWarning, match="is left out"),
        pytest.raises(CannotRun, match=r"sample \d+ of training_data cannot be read \(OSError: no sample \d+\)"),
    ):
        handed_out(loader_of(1, 0, dataset=Damaged(61), bad_samples=1))


def test_a_bad_sample_is_the_datasets_own_error_where_none_is_allowed() -> None:
    with pytest.raises(OSError, match="no sample"):
        handed_out(loader_of(1, 0, dataset=Damaged(61)))


def test_the_engine_moves_the_place_in_the_data() -> None:
    samples = [tuple(tensor[row] for tensor in training_bodies.batch_of(0)) for row in range(12)] * 3
    config = {"dataloader": {"num_workers": 1, "pin_memory": False, "bad_samples": 2, "seed": 41}}
    engine = engine_bodies.engine_of(Recipe(accumulation=3), config, dataset=samples)
    assert engine.dataloader.state_dict() == {"epoch": 0, "samples": 0, "seed": 41, "length": 36, "passes": 0}
    for batches, (ids, targets) in enumerate(engine.dataloader, start=1):
        engine.backward(engine(ids, targets))
        engine.step()
        assert engine.dataloader.state_dict()["samples"] == batches // 3 * 12
    assert (engine.dataloader.epoch, engine.dataloader.samples) == (1, 0)
