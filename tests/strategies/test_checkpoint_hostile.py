"""Hostile checkpoints: each is refused in one line, in bounded time and memory, and nothing has changed afterwards."""

from __future__ import annotations

import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dsplan
from strategies.checkpoint import storage
from strategies.checkpoint.reading import DEEPEST, why_no_cover
from strategies.checkpoint.restore import as_live
from strategies.errors import BrokenFile, CannotRun, DsplanError
from tests.strategies import hostile_bodies, training_bodies
from tests.strategies.hostile_bodies import KINDS, ON_RANKS, UP
from tests.strategies.training_bodies import Recipe

RECIPE = Recipe(precision="fp16")
SECONDS = 30
MEGABYTES = 200

_watches: list[list[str]] = []


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if _watches and event == "open" and isinstance(arguments[0], (str, bytes, Path)):
        _watches[-1].append(str(arguments[0]))


sys.addaudithook(_note_opened)


@contextmanager
def bounded() -> Iterator[list[str]]:
    """Inside, what hangs or grows is a failure; the files that are opened."""

    def late(*arguments: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    opened: list[str] = []
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _watches.append(opened)
    try:
        yield opened
    finally:
        _watches.pop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    assert grown < MEGABYTES * 1024, "in kB"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one step, in `run`."""
    top = tmp_path_factory.mktemp("good") / "run"
    hostile_bodies.save_one(RECIPE, str(top))
    return top


@pytest.fixture(scope="module")
def never_tried() -> float:
    """The loss of the third step of an engine that never loads anything."""
    return _trained_twice()[1]


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint; `outside`, beside it, is what links and paths lead to."""
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "outside").write_text("{}")
    return tmp_path / "run"


def _trained_twice() -> tuple[Any, float]:
    engine = hostile_bodies.make_engine(RECIPE)
    for step in range(2):
        training_bodies.one_step(engine, step)
    state = hostile_bodies.state_of(engine)
    loss = training_bodies.one_step(engine, 2)
    return state, loss


def test_there_are_as_many_kinds_as_were_asked_for() -> None:
    assert len(KINDS) >= 38


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(every=6)
def test_a_hostile_checkpoint_is_refused_and_nothing_has_changed(kind: str, run: Path, never_tried: float) -> None:
    named, damage = KINDS[kind]
    damage(run / "step-00000001")
    engine = hostile_bodies.make_engine(RECIPE)
    for step in range(2):
        training_bodies.one_step(engine, step)
    before = hostile_bodies.state_of(engine)
    with bounded() as opened, pytest.raises(DsplanError) as refusal:
        engine.load_checkpoint(run)
    line = str(refusal.value)
    assert named in line
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert ";" in line, "what is wrong; what to do"
    assert hostile_bodies.state_of(engine) == before
    assert training_bodies.one_step(engine, 2) == never_tried, "bit for bit"
    assert not hostile_bodies.canary_of(run / "step-00000001").exists()
    strangers = [path for path in opened if not path.startswith(str(run)) and not path.endswith((".py", ".pyc"))]
    assert strangers == []


@pytest.mark.parametrize("kind", ["a hole", "a flipped bit", "a model's file that leads up", "latest absolute"])
def test_an_export_reads_no_hostile_checkpoint(kind: str, run: Path, tmp_path: Path) -> None:
    named, damage = KINDS[kind]
    damage(run / "step-00000001")
    with bounded(), pytest.raises(BrokenFile, match=named):
        dsplan.export_checkpoint(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "config.json").exists()


def test_what_is_named_instead_is_a_checkpoint_that_loads(run: Path) -> None:
    """The newest whole one: not the newest, which has a hole, and not the one after it, whose sums are right."""
    for step in (2, 3, 4):
        shutil.copytree(run / "step-00000001", run / f"step-{step:08d}")
    KINDS["a header that is cut"][1](run / "step-00000003")
    KINDS["a hole"][1](run / "step-00000004")
    (run / "latest").write_text("step-00000004")
    with pytest.raises(BrokenFile, match=f"load {run}/step-00000002, the newest that is whole"):
        hostile_bodies.make_engine(RECIPE).load_checkpoint(run)


@pytest.mark.parametrize("name", ["model.pt", "a\nname", "notes.txt"])
def test_what_else_lies_in_the_folder_is_named_and_not_opened(
    name: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = run / "step-00000001"
    hostile_bodies.planted(name, is_listed=False)(folder)
    with bounded() as opened:
        hostile_bodies.make_engine(RECIPE).load_checkpoint(run)
    assert str(folder / name) not in opened
    assert not hostile_bodies.canary_of(folder).exists()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"dsplan: {folder}: {name!r} is none of its files and not read; move it out of the folder"


def test_a_module_that_refuses_its_state_has_it_back(run: Path) -> None:
    """The scheduler has taken its own by then, and gives it back too."""
    KINDS["a module that refuses its state"][1](run / "step-00000001")
    engine = hostile_bodies.make_engine(RECIPE)
    for step in range(2):
        training_bodies.one_step(engine, step)
    with pytest.raises(BrokenFile, match=r"set_extra_state of a module does not take its state \(KeyError: 'calls'\)"):
        engine.load_checkpoint(run)
    assert engine.lr_scheduler.last_epoch == 2
    assert engine.module.calls == 2


def test_a_disk_that_fails_after_all_was_read_says_that_the_engine_has_a_part(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = storage.BoxFile.read

    def fails(self: storage.BoxFile, key: str, offsets: Sequence[int], target: torch.Tensor) -> None:
        if key == UP:
            raise OSError(5, "Input/output error")
        original(self, key, offsets, target)

    monkeypatch.setattr(storage.BoxFile, "read", fails)
    line = r"read a second time \(.*safetensors: cannot be read \(Input/output error\).*has a part of it: load"
    with pytest.raises(BrokenFile, match=line):
        hostile_bodies.make_engine(RECIPE).load_checkpoint(run)


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        ("ddp", "torch"),
        ("fsdp", "torch"),
        *((f"zero{stage}", backend) for backend in ("native", "deepspeed") for stage in (1, 2, 3)),
    ],
)
@pytest.mark.sweep(every=3)
def test_if_one_rank_refuses_all_do_and_train_on_as_if_nothing_had_been(
    strategy: str, backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pool = request.getfixturevalue("deepspeed_ranks" if backend == "deepspeed" else "ranks")
    recipe = Recipe(strategy=strategy, backend=backend, world_size=2)
    pool.run(hostile_bodies.save_one, recipe, str(tmp_path / "good"))
    hostile = {}
    for number, (name, (_, damage)) in enumerate(ON_RANKS.items()):
        hostile[name] = str(tmp_path / str(number))
        shutil.copytree(tmp_path / "good", hostile[name])
        damage(Path(hostile[name], "step-00000001"))
    of_ranks = pool.run(hostile_bodies.refused, recipe, hostile)
    for name, (named, _) in ON_RANKS.items():
        lines = [messages[name] for messages, _, _ in of_ranks]
        assert named in lines[0] or "samples" in lines[0], name
        assert lines[0] == lines[1]
        assert len(lines[0].splitlines()) == 1
    assert [changed for _, changed, _ in of_ranks] == [[], []]
    for _, _, (never_tried, tried) in of_ranks:
        assert tried == never_tried, "bit for bit"


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [((), ())], None),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (2, 2)), ((2, 2), (2, 2))], None),
        (
            (3, 2, 2),
            [((0, 0, 0), (1, 1, 2)), ((0, 1, 0), (1, 1, 1)), ((0, 1, 1), (1, 1, 1)), ((1, 0, 0), (2, 2, 2))],
            None,
        ),
        ((2, 3), [((0, 0), (2, 3)), ((2, 0), (0, 3))], None),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], None),
        ((), [], "its boxes hold 0 elements of 1"),
        ((64, 2), [((0, 0), (40, 2))], "its boxes hold 80 elements of 128"),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))], "its boxes overlap"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "its boxes hold 8 elements of 4"),
        ((4,), [((3,), (4,))], "the box of [4] at [3] lies outside of [4]"),
        ((4,), [((0, 0), (2, 2))], "a box has 2 dimensions and the tensor 1"),
    ],
)
def test_every_element_is_covered_once(shape: Any, boxes: Any, problem: str | None) -> None:
    assert why_no_cover(shape, boxes) == problem


def test_many_boxes_take_no_long_time() -> None:
    """A staircase, which every cut makes shorter by one box, and a grid."""
    size = 20_000
    stairs = [((0, row), (size - row, 1)) if row % 2 else ((row, 0), (1, size - row)) for row in range(size)]
    grid = [((row, column), (1, 1)) for row in range(300) for column in range(300)]
    with bounded():
        assert why_no_cover((size, size), stairs)
        assert why_no_cover((300, 300), grid) is None


def test_another_scheduler_is_refused_with_what_to_do(run: Path) -> None:
    engine = hostile_bodies.make_engine(RECIPE)
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2)
    with pytest.raises(
        BrokenFile, match=r"its scheduler is not this one: has 'base_lrs' on .*; build the one that was"
    ):
        engine.load_checkpoint(run)
    engine.lr_scheduler = None
    assert engine.load_checkpoint(run)[0] == run / "step-00000001"


def test_milestones_of_a_scheduler_continue_from_json() -> None:
    """JSON makes texts of the steps, at which no rate would fall again."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    live = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5]).state_dict()
    assert as_live(live, {**live, "milestones": {"3": 2, "5": 1}})["milestones"] == live["milestones"]
    older = {**live, "verbose": False, "_of_another_torch": 1}
    assert as_live({**live, "_of_this_torch": 2}, older) == live
    with pytest.raises(ValueError, match="'gamma' is 'x', and was"):
        as_live(live, {**live, "gamma": "x"})


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    engine = hostile_bodies.make_engine(RECIPE)
    deepest: list[Any] = []
    for _ in range(DEEPEST - 3):
        deepest = [deepest]
    with pytest.raises(CannotRun, match="must not be nested more than 199 deep"):
        engine.save_checkpoint(tmp_path, {"deep": [deepest]})
    assert list(tmp_path.iterdir()) == []
    path = engine.save_checkpoint(tmp_path, {"deep": deepest})
    assert engine.load_checkpoint(tmp_path) == (path, {"deep": deepest})
