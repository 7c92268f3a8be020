"""A supervised engine: it saves by itself, resumes exactly, stops on one step, and gives up what is not finite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hardware_db.probe.cgroup import Limits
from planner.cost.failures import best_interval
from strategies.supervision import autosave, lineage
from tests.strategies import supervised_bodies
from tests.strategies.conftest import PoolOf
from tests.strategies.training_bodies import Recipe

DDP = Recipe(strategy="ddp", world_size=2)


@pytest.mark.parametrize(
    ("strategy", "backend", "accumulation"),
    [
        ("ddp", "torch", 1),
        ("ddp", "torch", 3),
        ("fsdp", "torch", 1),
        ("zero1", "native", 1),
        ("zero3", "native", 1),
        ("zero2", "deepspeed", 1),
    ],
)
@pytest.mark.sweep(every=2, suite={"fsdp-torch-1", "ddp-torch-3", "zero3-native-1"})
def test_a_run_stopped_on_the_way_resumes_at_the_exact_step_and_sample(
    pool_of: PoolOf, tmp_path: Path, strategy: str, backend: str, accumulation: int
) -> None:
    recipe = Recipe(strategy=strategy, backend=backend, world_size=2, accumulation=accumulation)
    pool = pool_of(strategy if backend == "deepspeed" else "ddp")
    whole = pool.run(supervised_bodies.whole, recipe, str(tmp_path / "whole"), 4)
    first = pool.run(supervised_bodies.stopped, recipe, str(tmp_path / "run"), 5)
    rest = pool.run(supervised_bodies.whole, recipe, str(tmp_path / "run"), 4)
    for rank in range(2):
        # Rank 0 was asked in step 5; all ranks know it within two steps.
        assert 5 <= first[rank][-1][0] <= 8
        assert first[0][-1][0] == first[1][-1][0]
        assert [*first[rank], *rest[rank]] == whole[rank]
    (checkpoint,) = lineage.read(tmp_path / "run")
    assert checkpoint.step == first[0][-1][0]


def test_a_trainer_resumes_in_the_middle_of_a_loader_that_keeps_no_place(pool_of: PoolOf, tmp_path: Path) -> None:
    def trained(folder: str, fails_at: tuple[int, int] | None) -> list[dict[str, object]]:
        body = supervised_bodies.trained_by_a_trainer
        return pool_of("ddp").run(body, DDP, str(tmp_path / folder), fails_at)

    whole, failed, resumed = trained("whole", None), trained("run", (2, 4)), trained("run", None)
    assert [of_ranks[0]["steps"] for of_ranks in (whole, failed, resumed)] == [15, 9, 15]
    assert all(torch.equal(whole[0][name], value) for name, value in resumed[0].items() if name != "steps")


def test_ranks_save_as_often_as_is_best_for_what_the_first_ones_save_took(pool_of: PoolOf, tmp_path: Path) -> None:
    (seconds, took), (other, _) = pool_of("ddp").run(supervised_bodies.saving_for_failures, DDP, str(tmp_path / "run"))
    assert took is not None
    assert seconds == other == pytest.approx(best_interval(took, 36_000.0))


def test_the_newest_two_automatic_checkpoints_stay(pool_of: PoolOf, tmp_path: Path) -> None:
    there = pool_of("ddp").run(supervised_bodies.saving, DDP, str(tmp_path), 4, 2)
    # The sixth may still be on its way when the fifth is seen complete.
    assert there[0][-1] == "step-00000012"
    assert 2 <= len(there[0]) <= 3
    assert [checkpoint.step for checkpoint in lineage.read(tmp_path)] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_continues_while_the_disk_is_full_and_saves_when_it_no_longer_is(
    pool_of: PoolOf, tmp_path: Path, asynchronous: bool
) -> None:
    before, after = pool_of("ddp").run(supervised_bodies.full_disk, DDP, str(tmp_path), asynchronous)[0]
    assert before == [2]
    assert after[-1] == 12


def test_an_automatic_save_that_failed_does_not_end_the_scripts_own(pool_of: PoolOf, tmp_path: Path) -> None:
    body = supervised_bodies.script_saves_after_a_full_disk
    of_ranks = pool_of("ddp").run(body, DDP, str(tmp_path / "run"), str(tmp_path / "own"))
    assert of_ranks[1] == (True, True)
    assert of_ranks[0][1]


def test_a_stop_saves_nothing_where_one_rank_is_not_finite(pool_of: PoolOf, tmp_path: Path) -> None:
    of_ranks = pool_of("ddp").run(supervised_bodies.stops_where_rank_1_is_not_finite, DDP, str(tmp_path))
    assert list(of_ranks) == 2 * [(None, ", not saved: losses or gradients are not finite")]
    assert not lineage.read(tmp_path)


@pytest.mark.parametrize(("left", "free"), [(None, 100), (40, 40), (400, 100)])
def test_free_host_memory_is_also_that_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch, left: int | None, free: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    monkeypatch.setattr(autosave, "cgroup_limits", lambda: Limits(memory_left_bytes=left))
    assert autosave._free_bytes() == free


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of("ddp")
    pool.run(supervised_bodies.saving, DDP, str(tmp_path), 2, 2)
    newest = lineage.newest_first(lineage.read(tmp_path))[0]
    assert newest.step == 6
    shard = Path(newest.path, "rank-00000.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    resumed = pool.run(supervised_bodies.whole, DDP, str(tmp_path), 2)
    assert [step for step, _ in resumed[0]] == [5, 6]


def test_the_scripts_own_checkpoint_counts_where_it_is_newer(pool_of: PoolOf, tmp_path: Path) -> None:
    pool, run, own = pool_of("ddp"), str(tmp_path / "run"), str(tmp_path / "own")
    assert pool.run(supervised_bodies.script_saves, DDP, run, own, 1) == [3, 3]
    path, step, state = pool.run(supervised_bodies.script_loads, DDP, run, own)[0]
    assert (path, step, state) == (f"{own}/step-00000003", 3, {"at": 3})
    # The run continues to step 6 and is stopped there: its checkpoint is newer than the script's of step 3.
    pool.run(supervised_bodies.stopped, DDP, run, 5)
    path, step, state = pool.run(supervised_bodies.script_loads, DDP, run, own)[0]
    assert Path(path).parent == tmp_path / "run" / "checkpoints"
    assert step > 3
    assert state == {}


def test_a_script_that_loads_a_checkpoint_of_another_run_keeps_it_at_its_start(pool_of: PoolOf, tmp_path: Path) -> None:
    pool, own = pool_of("ddp"), str(tmp_path / "own")
    pool.run(supervised_bodies.script_saves, DDP, str(tmp_path / "earlier"), own, 2)
    path, step, _ = pool.run(supervised_bodies.script_loads, DDP, str(tmp_path / "new"), own)[0]
    assert (path, step) == (f"{own}/step-00000006", 6)


def test_losses_that_stay_nan_end_the_run_and_are_never_saved(pool_of: PoolOf, tmp_path: Path) -> None:
    for message, checkpoints in pool_of("ddp").run(supervised_bodies.blow_up, DDP, str(tmp_path)):
        assert message.startswith("NotFinite: losses of the last 20 steps are NaN or infinite, up to step 20")
        assert checkpoints == 0


def test_a_save_that_cannot_end_in_time_is_not_begun(pool_of: PoolOf, tmp_path: Path) -> None:
    for message, checkpoints in pool_of("ddp").run(supervised_bodies.too_late, DDP, str(tmp_path)):
        assert message == "stopped at step 3, not saved: the time left is shorter than saving takes"
        assert checkpoints == 0


def test_a_script_that_reads_client_state_is_saved_for_where_it_keeps_it_up_to_date(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    pool = pool_of("ddp")
    assert pool.run(supervised_bodies.script_reads_state, DDP, str(tmp_path / "own"), False)[0] == ([], {})
    steps, state = pool.run(supervised_bodies.script_reads_state, DDP, str(tmp_path / "kept"), True)[0]
    assert (steps[-1], state) == (3, {"best": 0.5})


def test_reading_data_does_not_move_the_random_state(pool_of: PoolOf, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(2).tolist()
    drawn = pool_of("ddp").run(supervised_bodies.wandering_random_state, DDP, str(tmp_path))
    assert drawn == [expected, expected]
