"""One format: what any strategy writes on any number of ranks, any other reads, and continues as if nothing was."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies import checkpoint_bodies
from tests.strategies.training_bodies import Recipe

TORCH = ("ddp", "fsdp", "fsdp-grad-op")
ZERO = ("zero1", "zero2", "zero3")
STEPS = 3
Who = tuple[str, str, int]
WRITERS: tuple[Who, ...] = (
    ("single", "torch", 1),
    ("ddp", "torch", 2),
    ("fsdp", "torch", 3),
    ("zero1", "native", 2),
    ("zero2", "native", 3),
    ("zero3", "native", 3),
    ("zero1", "deepspeed", 3),
    ("zero2", "deepspeed", 2),
    ("zero3", "deepspeed", 2),
)
READERS: tuple[Who, ...] = (
    ("ddp", "torch", 2),
    ("fsdp", "torch", 3),
    ("zero1", "native", 3),
    ("zero2", "native", 2),
    ("zero3", "native", 3),
    ("zero1", "deepspeed", 2),
    ("zero3", "deepspeed", 3),
)
"""Those that the suite asks: every way of reading once."""


def recipe_of(who: Who, precision: str = "fp32") -> Recipe:
    strategy, backend, world_size = who
    return Recipe(strategy=strategy, backend=backend, world_size=world_size, precision=precision)


class Ranks:
    """The pool that a strategy is tested on; a process alone is the test's own."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def run(self, who: Who, function: object, *arguments: object) -> object:
        _, backend, world_size = who
        if world_size == 1:
            return function(*arguments)  # type: ignore[operator]
        if backend == "deepspeed" and find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        name = f"{'deepspeed_' if backend == 'deepspeed' else ''}{'three_' if world_size == 3 else ''}ranks"
        pool: RankPool = self._request.getfixturevalue(name)
        return pool.run(function, *arguments)[0]  # type: ignore[arg-type]

    def going_through(self, relay: list[Who], library: str, precision: str) -> list[Who]:
        """The relay through DeepSpeed too, where it has the precision, or through our own engines alone."""
        if library == "deepspeed":
            self.run(("zero1", "deepspeed", 2), str, recipe_of(("zero1", "deepspeed", 2), precision))  # skips
        return [who for who in relay if library == "deepspeed" or who[1] != "deepspeed"]


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request)


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Who, tuple[str, object]]:
    """A checkpoint of each writer after three steps, and the losses of the two steps that it made next."""
    top, on = tmp_path_factory.mktemp("written"), Ranks(request)
    checkpoints: dict[Who, tuple[str, object]] = {}
    for who in WRITERS:
        if who[1] != "deepspeed" or find_spec("deepspeed") is not None:
            folder = str(top / "-".join(map(str, who)))
            checkpoints[who] = folder, on.run(who, checkpoint_bodies.save_after, recipe_of(who), folder, STEPS)
    return checkpoints


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [*((name, "torch") for name in TORCH), *((name, engine) for engine in ("native", "deepspeed") for name in ZERO)],
)
@pytest.mark.sweep(every=6, suite=lambda strategy, backend, world_size: (strategy, backend, world_size) in READERS)
def test_every_checkpoint_continues_under_every_strategy(
    strategy: str, backend: str, world_size: int, on: Ranks, written: dict[Who, tuple[str, object]]
) -> None:
    reader = (strategy, backend, world_size)
    folders = [folder for folder, _ in written.values()]
    resumed = on.run(reader, checkpoint_bodies.resume_each, recipe_of(reader), folders, STEPS)
    assert isinstance(resumed, list)
    for writer, losses in zip(written, resumed, strict=True):
        assert losses == pytest.approx(written[writer][1], rel=1e-6), writer


def test_every_checkpoint_continues_in_one_process(written: dict[Who, tuple[str, object]]) -> None:
    resumed = checkpoint_bodies.resume_each(Recipe(), [folder for folder, _ in written.values()], STEPS)
    for writer, losses in zip(written, resumed, strict=True):
        assert losses == pytest.approx(written[writer][1], rel=1e-6), writer


@pytest.mark.parametrize("library", ["native", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_masters_and_states_stay_the_same_bits_from_hand_to_hand(library: str, on: Ranks, tmp_path: Path) -> None:
    """In bf16 every strategy has fp32 masters somewhere; nothing is lost by going through all of them."""
    relay: list[Who] = [
        ("zero3", "native", 2),
        ("zero3", "deepspeed", 3),
        ("fsdp", "torch", 3),
        ("zero1", "deepspeed", 2),
        ("ddp", "torch", 2),
        ("zero1", "native", 3),
        ("zero2", "deepspeed", 3),
        ("fsdp-grad-op", "torch", 2),
        ("zero2", "native", 2),
        ("single", "torch", 1),
    ]
    relay = on.going_through(relay, library, "bf16")
    folders = [str(tmp_path / str(number)) for number in range(len(relay))]
    on.run(relay[0], checkpoint_bodies.save_after, recipe_of(relay[0], "bf16"), folders[0], STEPS)
    first = checkpoint_bodies.tensors_of(Path(folders[0]))
    assert {value.dtype for value in first.values()} == {torch.float32}
    assert len(first) == 20 * 4, "weights, two moments and a step each"
    for who, source, goal in zip(relay[1:], folders, folders[1:], strict=False):
        on.run(who, checkpoint_bodies.pass_on, recipe_of(who, "bf16"), source, goal)
        now = checkpoint_bodies.tensors_of(Path(goal))
        assert now.keys() == first.keys(), who
        for name, value in first.items():
            assert torch.equal(now[name], value), (who, name)


@pytest.mark.parametrize("library", ["native", "deepspeed"])
def test_schedules_and_loss_scales_go_from_hand_to_hand(library: str, on: Ranks, tmp_path: Path) -> None:
    relay: list[Who] = [
        ("zero2", "native", 2),
        ("zero1", "deepspeed", 2),
        ("ddp", "torch", 3),
        ("zero3", "deepspeed", 3),
        ("zero3", "native", 2),
    ]
    relay = on.going_through(relay, library, "fp16")
    rates, scales = [], []
    for number, who in enumerate(relay):
        source = str(tmp_path / str(number - 1)) if number else ""
        answer = on.run(who, checkpoint_bodies.relayed, recipe_of(who, "fp16"), source, str(tmp_path / str(number)))
        rate, scale, steps, losses = answer  # type: ignore[misc]
        assert steps == max(2, 2 * number)
        assert all(loss < 30 for loss in losses), who
        rates.append(rate[0])
        scales.append(scale)
    assert rates[0] == rates[1], "as it was saved"
    assert rates[1:] == sorted(set(rates)), "the warmup continues"
    assert scales[:2] == [256.0, 256.0]
    assert scales[-1] > 256.0, "it grows after three steps without an overflow, whoever took them"


@pytest.mark.slow
def test_the_whole_matrix(tmp_path: Path) -> None:
    """Nine ways of training on one to four ranks, each from the checkpoints of all: 1,296 pairs."""
    kinds = [*((name, "torch") for name in TORCH), *((n, backend) for backend in ("native", "deepspeed") for n in ZERO)]
    expected: dict[Who, list[float]] = {}
    for world_size in (1, 2, 3, 4):
        with RankPool(world_size, variables={"DS_ACCELERATOR": "cpu"}, timeout_seconds=600) as pool:
            for who in ((*kind, world_size) for kind in kinds):
                folder = str(tmp_path / "-".join(map(str, who)))
                expected[who] = pool.run(checkpoint_bodies.save_after, recipe_of(who), folder, STEPS)[0]
    folders = [str(tmp_path / "-".join(map(str, who))) for who in expected]
    for world_size in (1, 2, 3, 4):
        with RankPool(world_size, variables={"DS_ACCELERATOR": "cpu"}, timeout_seconds=600) as pool:
            for reader in ((*kind, world_size) for kind in kinds):
                resumed = pool.run(checkpoint_bodies.resume_each, recipe_of(reader), folders, STEPS)[0]
                for writer, losses in zip(expected, resumed, strict=True):
                    assert losses == pytest.approx(expected[writer], rel=1e-6), (writer, reader)
