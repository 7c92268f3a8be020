"""Ranks that find each other, and the one line each says where they cannot; real processes over real sockets."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.distributed import rendezvous
from strategies.distributed.launcher_env import ProcessVariables
from strategies.variables import RENDEZVOUS_SECONDS
from tests.strategies.attempts import attempt_options
from tests.strategies.distributed import meeting_bodies
from tests.strategies.distributed.meeting_bodies import Role


@pytest.fixture(scope="module")
def pool(new_pool: Callable[..., RankPool]) -> Iterator[RankPool]:
    with new_pool(3) as ranks:
        yield ranks


GIVEN_OUT: set[int] = set()
"""Ports that this process has given to a test already."""


def free_port() -> int:
    """A port that no connection takes by itself, below the range for outgoing ones, and no other test was given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    entropy = random.SystemRandom()  # a seed that every process sets would give all of them one port
    for _ in range(100):
        with socket.socket() as opened, contextlib.suppress(OSError):
            port = 20000 + worker + 8 * entropy.randrange(1500)
            opened.bind(("127.0.0.1", port))
            if port not in GIVEN_OUT:
                GIVEN_OUT.add(port)
                return port
    raise RuntimeError("no free port between 20000 and 32000")


def outcomes(pool: RankPool, *roles: Role | None, seconds: float = 20.0) -> list[str]:
    played = pool.run(meeting_bodies.play, roles, free_port(), seconds)
    assert all(taken < seconds + 60 for _, taken in played)  # the usual patience is 600
    lines = [line for line, _ in played]
    assert all("\n" not in line for line in lines)
    return lines


def test_ranks_that_agree_meet(pool: RankPool) -> None:
    assert outcomes(pool, *(Role(rank=rank, world_size=3) for rank in range(3))) == ["met"] * 3


def test_a_late_rank_is_waited_for(pool: RankPool) -> None:
    late = Role(rank=0, world_size=3, late_seconds=0.5)
    assert outcomes(pool, Role(rank=1, world_size=3), late, Role(rank=2, world_size=3)) == ["met"] * 3


def test_ranks_that_an_agent_started_are_waited_for(pool: RankPool) -> None:
    roles = (Role(rank=0, world_size=2), Role(rank=1, world_size=2, late_seconds=4.0), None)
    begun = pool.run(meeting_bodies.play_under_an_agent, roles, free_port(), 2)
    assert [line for line, _ in begun] == ["met", "met", "agent"]
    lines = pool.run(meeting_bodies.play_under_an_agent, roles, free_port(), 3)  # somebody made three of them two
    assert "rank 1 has not come within 500 ms; start 2 processes" in lines[0][0]


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_ended_before_the_others_met_it_again_is_named_at_once(pool: RankPool, first: int) -> None:
    roles = [Role(rank=rank, world_size=2, ends=rank == first, meets_again=rank != first) for rank in range(2)]
    played = pool.run(meeting_bodies.play_under_an_agent, [*roles, None], free_port(), 2)
    message, seconds = played[1 - first]
    assert f"rank {first} on" in message
    assert "ended with status 0 before the others met it" in message
    assert seconds < 100  # the patience of ranks that have met is 600


@pytest.mark.parametrize(("hang_seconds", "waited"), [(5.0, 20.0), (90.0, 90.0), (900.0, 600.0), (0.0, 600.0)])
def test_ranks_of_a_run_wait_no_longer_than_a_hang_takes(
    hang_seconds: float, waited: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt_options(checkpoint_directory="", hang_seconds=hang_seconds).save(tmp_path)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_WORLD_SIZE": "2", "DSPLAN_RUN_DIR": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = ProcessVariables(source="the test", rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert rendezvous._stranger_seconds(process) == waited
    monkeypatch.setenv("ROLE_WORLD_SIZE", "3")
    assert rendezvous._stranger_seconds(process) == rendezvous.FIRST_SECONDS


def test_two_processes_with_one_rank_are_named_on_all(pool: RankPool) -> None:
    lines = outcomes(pool, Role(rank=0, world_size=3), Role(rank=1, world_size=3), Role(rank=1, world_size=3))
    for line in lines:
        assert "are both rank 1 of 3; give every process its own RANK" in line
        assert sum(f"process {pid} on" in line for pid in pool.process_ids) == 2


def test_two_first_ranks_are_named_on_both(pool: RankPool) -> None:
    lines = outcomes(pool, Role(rank=0, world_size=2), Role(rank=0, world_size=2, late_seconds=0.3), None)
    for line in lines[:2]:
        assert "are both rank 0 of 2; give every process its own RANK" in line
        assert "if they are two jobs, give each its own MASTER_PORT" in line
        assert sum(f"process {pid} on" in line for pid in pool.process_ids) == 2


def test_ranks_that_count_differently_are_told_so(pool: RankPool) -> None:
    lines = outcomes(pool, Role(rank=0, world_size=3), Role(rank=1, world_size=2), None)
    for line in lines[:2]:
        assert "counts 3 ranks and rank 1" in line
        assert "counts 2; give all of them one WORLD_SIZE" in line


def test_a_rank_that_never_comes_is_named(pool: RankPool) -> None:
    lines = outcomes(pool, Role(rank=0, world_size=3), None, Role(rank=2, world_size=3), seconds=1.0)
    for line in (lines[0], lines[2]):
        assert "rank 0 of 3 on" in line
        assert "rank 1 has not come within 1 s; start 3 processes, or correct WORLD_SIZE" in line


def test_a_first_rank_that_began_later_still_says_who_is_missing(pool: RankPool) -> None:
    late = Role(rank=0, world_size=3, late_seconds=1.5)
    # Patience begins with each rank: on busy cores the first has begun 5 seconds later than it should.
    lines = outcomes(pool, late, None, Role(rank=2, world_size=3), seconds=15.0)
    assert lines[0] == lines[2]
    assert "rank 1 has not come within 15 s" in lines[0]


def test_one_gpu_for_two_ranks_is_refused_on_both(pool: RankPool) -> None:
    roles = [Role(rank=rank, world_size=2, device="cuda:0") for rank in range(2)]
    for line in outcomes(pool, *roles, None)[:2]:
        assert "rank 0 and rank 1 both use cuda:0 of" in line
        assert "set LOCAL_RANK" in line


def test_an_address_that_nobody_answers_is_named(pool: RankPool) -> None:
    line = outcomes(pool, None, Role(rank=1, world_size=2), None, seconds=0.5)[1]
    assert "rank 1 on" in line
    assert "cannot reach rank 0 at 127.0.0.1:" in line
    assert "check MASTER_ADDR and MASTER_PORT" in line


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", RENDEZVOUS_SECONDS: "1"},
            "finds no host 'no-such-host.invalid'",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "DSPLAN_RENDEZVOUS_SECONDS": "soon"}, "must be a number of seconds above 0"),
    ],
)
@pytest.mark.sweep(every=2)
def test_what_a_lone_process_can_know_is_reported(variables: dict[str, str], complaint: str) -> None:
    script = (
        "from strategies.distributed.environment import join\n"
        "from hardware_db.errors import DsplanError\n"
        "try: join()\n"
        "except DsplanError as refusal: print(refusal)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert complaint in finished.stdout
    assert finished.stdout.count("\n") == 1
    assert finished.stderr == ""
