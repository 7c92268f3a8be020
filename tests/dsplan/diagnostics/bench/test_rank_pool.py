"""The persistent ranks that every distributed test stands on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from hardware_db.errors import DsplanError
from tests.strategies import rank_bodies


def test_every_rank_answers_in_rank_order(ranks: RankPool) -> None:
    assert ranks.run(rank_bodies.rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]


def test_ranks_meet_in_a_directory_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., RankPool]
) -> None:
    (tmp_path / "of a user").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of a user"))
    with new_pool(2, timeout_seconds=60) as pool:
        assert pool.run(rank_bodies.rank_and_sum, 1) == [(0, 3.0), (1, 3.0)]


def test_ranks_are_kept_between_calls(ranks: RankPool) -> None:
    ranks.run(rank_bodies.rank_and_sum, 0)
    before = ranks.process_ids
    ranks.run(rank_bodies.rank_and_sum, 0)
    assert ranks.process_ids == before, "a call must not start processes"


def test_groups_that_calls_made_do_not_pile_up(ranks: RankPool) -> None:
    before = ranks.run(rank_bodies.make_groups, 0)[0]
    assert ranks.run(rank_bodies.make_groups, 3)[0] >= before + 6
    assert ranks.run(rank_bodies.make_groups, 0)[0] <= before


def test_an_exception_comes_back_with_rank_traceback_and_output(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: rank 1 meant to fail") as failure:
        ranks.run(rank_bodies.fail_on, 1)
    assert "in fail_on" in failure.value.reports[1]
    assert "last words" in failure.value.reports[1]


def test_a_failed_pool_is_replaced(ranks: RankPool) -> None:
    ranks.run(rank_bodies.rank_and_sum, 0)
    before = ranks.process_ids
    with pytest.raises(RankError):
        ranks.run(rank_bodies.fail_on, 0)
    assert ranks.process_ids == []
    assert ranks.run(rank_bodies.rank_and_sum, 0)[0] == (0, 1.0)
    assert not set(before) & set(ranks.process_ids)


def test_a_death_and_a_hang_are_reported_and_leave_nothing(
    new_pool: Callable[..., RankPool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with new_pool(2, timeout_seconds=1.0, variables={"DSPLAN_TEST_WORD": "here"}) as pool:
        assert pool.run(rank_bodies.environment_of, "DSPLAN_TEST_WORD") == ["here", "here"]
        with pytest.raises(RankError, match=r"rank 1 of 2 did not answer in 1 s") as late:
            pool.run(rank_bodies.hang_on, 1)
        assert "in hang_on" in late.value.reports[1]
        with pytest.raises(RankError, match=r"rank [01] of 2 failed: the process ended with status 7"):
            pool.run(rank_bodies.exit_process, 7)
    assert list(tmp_path.iterdir()) == []
    assert "DSPLAN_TEST_WORD" not in os.environ


def test_only_importable_functions_are_accepted(ranks: RankPool) -> None:
    with pytest.raises(DsplanError, match="cannot be sent to ranks"):
        ranks.run(lambda: 1)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(DsplanError, match="at least 1"):
        RankPool(0)


def test_ranks_of_all_pools_are_forked_from_one_process_that_has_imported_what_they_need(
    ranks: RankPool, new_pool: Callable[..., RankPool]
) -> None:
    with new_pool(1, variables={"DSPLAN_TEST_WORD": "here"}) as pool:
        (answer,) = pool.run(rank_bodies.parent_and_modules)
        assert pool.run(rank_bodies.environment_of, "DSPLAN_TEST_WORD") == ["here"]
    parents = {parent for parent, _ in (answer, *ranks.run(rank_bodies.parent_and_modules))}
    assert len(parents) == 1
    assert os.getpid() not in parents
    assert "torch.distributed.checkpoint" in answer[1]


@pytest.mark.parametrize("preload", [(), ("torch",)], ids=["spawned", "forked"])
@pytest.mark.sweep(suite={"forked"})
def test_ranks_end_with_their_parent(preload: tuple[str, ...]) -> None:
    script = textwrap.dedent("""
        import os, sys
        if __name__ == "__main__":
            from tests.strategies import rank_bodies
            from dsplan.diagnostics.bench.rank_pool import RankPool
            pool = RankPool(1, preload=sys.argv[1:])
            pool.run(rank_bodies.environment_of, "RANK")
            print(pool.process_ids[0], flush=True)
            os.kill(os.getpid(), 9)
    """)
    root = Path(__file__).parents[4]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "parent.py")
        path.write_text(script)
        environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": folder}
        finished = subprocess.run(
            [sys.executable, path, *preload], env=environment, stdout=subprocess.PIPE, text=True, timeout=120
        )
    rank = int(finished.stdout)
    deadline = time.monotonic() + 60
    while _alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(rank)


def _alive(process_id: int) -> bool:
    """Return whether a process runs; one that has ended but that nobody has reaped does not count."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
