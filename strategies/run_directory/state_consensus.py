"""The state that the ranks of a run agree on before its script begins, and ranks that wait as all are too many."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_db.notices import notice
from planner.types.plan_io import load_plan
from strategies.run_directory.heartbeat import resting
from strategies.run_directory.request import named, plan_request
from strategies.run_directory.resume_state import Findings, ResumeState, combined

if TYPE_CHECKING:
    from strategies.torch_compat.distributed import Store

_LOOK_SECONDS = 0.5
_ENDED = "ended"

_state: ResumeState | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank of `ranks` that were started, and its number on its node."""

    rank: int
    local_rank: int
    ranks: int


def reach_consensus(store: Store | None, run_directory: Path) -> ResumeState:
    """Return the state of the run from what every node knows; called once on every rank, with RANK and WORLD_SIZE set.

    `store` is the one that the ranks met in, None for a rank alone.

    Raises:
        BrokenFile: the plan of the command line cannot be read.
    """
    global _state
    rank_place = Place(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        ranks=int(os.environ.get("WORLD_SIZE", "1")),
    )
    _state = consensus(store, rank_place, run_directory)
    return _state


def consensus(store: Store | None, rank_place: Place, run_directory: Path) -> ResumeState:
    """Return the state of the run for a rank at its place."""
    # The first rank of every node reports what is in its run directory.
    own = Findings.of(run_directory) if rank_place.local_rank == 0 else Findings()
    if store is None:
        return _combined([own], rank_place.ranks)
    store.set(f"findings-{rank_place.rank}", own.to_text())
    if rank_place.rank == 0:
        everyone = [Findings.from_text(store.get(f"findings-{rank}").decode()) for rank in range(rank_place.ranks)]
        store.set("resume-state", _combined(everyone, rank_place.ranks).to_text())
    return ResumeState.from_text(store.get("resume-state").decode())


def current() -> ResumeState:
    """Return the consensus; of a process that `dsplan run` did not start, that nothing went before."""
    return _state or ResumeState(ranks=int(os.environ.get("WORLD_SIZE", "1")))


def narrow(state: ResumeState, variables: MutableMapping[str, str]) -> None:
    """Set this rank's variables so that only the first ranks train."""
    rank, local = int(variables["RANK"]), int(variables.get("LOCAL_RANK", "0"))
    here = int(variables.get("LOCAL_WORLD_SIZE", "1"))
    variables["WORLD_SIZE"] = str(state.ranks)
    variables["LOCAL_WORLD_SIZE"] = str(min(here, state.ranks - (rank - local)))


def wait_for_training_ranks(store: Store, state: ResumeState) -> None:
    """Wait on a rank that does not train; return when rank 0's script has ended."""
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    batch = state.global_batch_size
    notice(f"rank {rank} of {ranks} waits: the global batch of {batch} is split over {state.ranks} ranks")
    # The store may go with the process that has it.
    with contextlib.suppress(RuntimeError), resting():
        while not store.check([_ENDED]):
            time.sleep(_LOOK_SECONDS)


def release_waiting_ranks(store: Store) -> None:
    """Rank 0, when its script has ended: those that wait may end too."""
    with contextlib.suppress(RuntimeError):  # those that wait end with the store too
        store.set(_ENDED, "")


def _combined(findings: list[Findings], ranks: int) -> ResumeState:
    request = plan_request()
    given = load_plan(request.plan_file) if request.plan_file else None
    return combined(findings, ranks, given, request.strategy, named(request.degrees))
