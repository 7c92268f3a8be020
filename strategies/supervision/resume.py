"""Going on where an earlier attempt of the run has saved.

Three sources say which checkpoints a run has: its list, its journal, and the directories themselves, whose checkpoints
say of which run they are. What is on disk counts; a list that is lost, cut or of another run makes no run start over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from strategies.checkpoint import retention
from strategies.checkpoint.content import Content, read_content
from strategies.checkpoint.object_store import Unreachable, location
from strategies.distributed.consensus import objects_of_all, on_rank_zero
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import CHECKPOINTS, LINEAGE_FILE
from strategies.supervision import lineage
from strategies.supervision.autosave import SupervisedEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The checkpoint from which an engine resumes."""

    checkpoint: lineage.RunCheckpoint
    client_state: Mapping[str, Any]
    """The script's own state in it."""
    passed_over: str = ""
    """Why a newer one had to be passed over; empty: there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidates:
    newest_first: tuple[lineage.RunCheckpoint, ...]
    furthest: int
    """The furthest step of which there was a complete checkpoint."""


def add_common_past(options: AttemptOptions, environment: Environment) -> AttemptOptions:
    """Add to rank 0's options what other nodes know of the run's past, which a node that has just come does not."""
    if environment.world_size == 1:
        return options
    everyones = objects_of_all(options)
    return replace(
        everyones[0],
        reached=max(rank_options.reached for rank_options in everyones),
        may_begin_anew=all(rank_options.may_begin_anew for rank_options in everyones),
        since=max(rank_options.since for rank_options in everyones),
        base=next((rank_options.base for rank_options in everyones if rank_options.base), ""),
    )


def resume(engine: SupervisedEngine, run_directory: Path, options: AttemptOptions) -> Resumed | None:
    """Restore the newest whole checkpoint of the run. Return None if the run has none. Every rank calls this.

    Raises:
        DsplanError: there are checkpoints and none of them can be loaded; the newest one's reason, and what to do.
    """
    refusal: DsplanError | None = None
    candidates = _find(engine, run_directory, options)
    for checkpoint in candidates.newest_first:
        try:
            path, state = engine._checkpoints.load(location(checkpoint.path))
        except Unreachable as problem:  # and so would be the one before
            problem.exit_code = 1  # the next attempt may find it
            raise
        except DsplanError as problem:  # on every rank, a BrokenFile on the one that found it
            refusal = refusal or problem
            if engine.is_main:
                notice(f"{problem}; trying the one before")
            continue
        if path is not None:
            if checkpoint.is_automatic:
                engine.client_state.update(state)
            behind = candidates.furthest - checkpoint.step
            again = "1 step is made again" if behind == 1 else f"{behind} steps are made again"
            what = "cannot be loaded" if refusal else "is gone"
            why = f"the newer one of step {candidates.furthest} {what}, so {again}"
            return Resumed(checkpoint=checkpoint, client_state=state, passed_over=why if behind > 0 else "")
    if refusal is not None and refusal.exit_code == DsplanError.exit_code:
        raise CannotRun(
            f"{refusal}; no checkpoint of the run can be loaded: put a whole one back, or begin anew with dsplan run"
            f" --resume {run_directory} --resume-from start"
        )
    if refusal is not None:
        raise refusal
    return None


def nothing_left(run_directory: Path, options: AttemptOptions, folders: Sequence[Path] = ()) -> CannotRun:
    """Return the error where nothing is left to resume from; `folders`: searched, if not those of automatic saves."""
    where = f" (looked in {', '.join(map(str, folders or _own_folders(run_directory, options)))})"
    lost = f"the checkpoint {options.base} to resume from is not there" if options.base else "no checkpoint is left"
    return CannotRun(
        f"{run_directory}: the run came to step {options.reached} and {lost}{'' if options.base else where}; put its"
        f" checkpoints back, or begin anew with dsplan run --resume {run_directory} --resume-from start"
    )


def step_of(directory: Path) -> int | None:
    """Return the step of what `load_checkpoint(directory)` would load, or None; the same on every rank."""

    def look() -> int | None:
        try:
            path = retention.named_latest(directory)
            return None if path is None else int(read_content(path).progress["global_steps"])
        except (DsplanError, KeyError, ValueError, TypeError, OverflowError):
            return None  # loading it says what is wrong

    return on_rank_zero(look)


def is_left_behind(directory: Path, options: AttemptOptions) -> bool:
    """Return whether `load_checkpoint(directory)` would load what this run has left; alike on all ranks."""

    def look() -> bool:
        path = retention.named_latest(directory)
        checkpoint = None if path is None else _read_checkpoint(path)
        return checkpoint is not None and checkpoint.run == options.run_id and checkpoint.attempt < options.since

    return bool(options.since) and on_rank_zero(look)


def _find(engine: SupervisedEngine, run_directory: Path, options: AttemptOptions) -> _Candidates:
    """Collect what any node knows of, and what rank 0 finds, which reports what is wrong with the list."""
    own = lineage.read_lineage(run_directory) if engine.environment.local_rank == 0 else lineage.Lineage()
    everyones = objects_of_all(own)
    return on_rank_zero(lambda: _choose(everyones, run_directory, options))


def _choose(everyones: Sequence[lineage.Lineage], run_directory: Path, options: AttemptOptions) -> _Candidates:
    noted = [checkpoint for node in everyones for checkpoint in node.all if checkpoint.by != "huggingface"]
    runs = lineage.own_runs(noted, options.run_id, has_nodes=options.has_nodes)
    foreign = [checkpoint for checkpoint in noted if checkpoint.run and checkpoint.run not in runs]
    if foreign:
        notice(f"{run_directory / LINEAGE_FILE} lists {len(foreign)} checkpoints of another run: passed over")
    counted = [checkpoint for checkpoint in noted if checkpoint not in foreign and checkpoint.attempt >= options.since]
    folders = {location(checkpoint.path).parent for checkpoint in noted if checkpoint not in foreign}
    folders |= {*_own_folders(run_directory, options)}
    unnoted = _find_unnoted(folders, {checkpoint.path for checkpoint in noted}, runs, run_directory)
    candidates = lineage.newest_first(
        [*counted, *(checkpoint for checkpoint in unnoted if checkpoint.attempt >= options.since)]
    )
    listed = {checkpoint.path for node in everyones for checkpoint in node.listed}
    if missing := [checkpoint for checkpoint in candidates if checkpoint.path not in listed]:
        _mend(missing, everyones, run_directory)
    # What only other nodes have listed is this node's to clear away from now on.
    here = {checkpoint.path for checkpoint in everyones[0].listed}
    _list([checkpoint for checkpoint in candidates if checkpoint.path in listed - here], run_directory)
    if not candidates and options.base:
        base = _read_checkpoint(location(options.base))
        candidates = [] if base is None else [base]
    complete = [
        checkpoint for node in everyones for checkpoint in node.journalled if checkpoint.attempt >= options.since
    ]
    furthest = max((checkpoint.step for checkpoint in (*candidates, *complete) if checkpoint not in foreign), default=0)
    return _Candidates(newest_first=tuple(candidates), furthest=furthest)


def _own_folders(run_directory: Path, options: AttemptOptions) -> list[Path]:
    """List the folders where the run's ranks save by themselves, now or when nobody named one."""
    named, usual = location(options.supervision.checkpoint_directory), run_directory / CHECKPOINTS
    return list(dict.fromkeys([named.absolute(), usual.absolute()]))


def _find_unnoted(
    folders: Iterable[Path], noted: set[str], runs: set[str], run_directory: Path
) -> list[lineage.RunCheckpoint]:
    """Find the checkpoints of this run in some folders that neither list nor journal names.

    One that does not name its run counts where only this run saves.
    """
    usual, unnoted = (run_directory / CHECKPOINTS).absolute(), []
    for parent in sorted(folders):
        for path in retention.published(parent):
            if str(path.absolute()) in noted or (checkpoint := _read_checkpoint(path)) is None:
                continue
            if checkpoint.run in runs if checkpoint.run else parent == usual:
                unnoted.append(checkpoint)
    return unnoted


def _read_checkpoint(path: Path) -> lineage.RunCheckpoint | None:
    """Return a checkpoint as a row of the list, from its own content, or None if it cannot be read."""
    try:
        content = read_content(path)
        step = content.progress["global_steps"]
    except Unreachable:
        raise
    except (DsplanError, KeyError):
        return None
    if not isinstance(step, int):
        return None
    mark = _mark(content)
    return lineage.RunCheckpoint(path=str(path.absolute()), step=step, time=retention.saved_at(path), **mark)


def _mark(content: Content) -> dict[str, Any]:
    mark = content.written_by.get("made")
    if not isinstance(mark, Mapping):
        return {}
    kinds = {"run": str, "attempt": int, "is_automatic": bool}
    return {name: mark[name] for name, kind in kinds.items() if isinstance(mark.get(name), kind)}


def _mend(missing: Sequence[lineage.RunCheckpoint], everyones: Sequence[lineage.Lineage], run_directory: Path) -> None:
    """Report that the list lacks checkpoints that are there, and add them to it, so that they are removed in time."""
    path = run_directory / LINEAGE_FILE
    what = "is not complete" if any(node.has_list for node in everyones) else "is gone"
    if damaged := sum(node.damaged_lines for node in everyones):
        what = f"has {damaged} line{'s' if damaged > 1 else ''} that cannot be read"
    steps = ", ".join(str(checkpoint.step) for checkpoint in sorted(missing, key=lambda checkpoint: checkpoint.step))
    notice(f"{path} {what} and does not name the checkpoints of step {steps}, which are there; they count")
    _list(missing, run_directory)


def _list(newest_first: Sequence[lineage.RunCheckpoint], run_directory: Path) -> None:
    """Add checkpoints to the list of rank 0's node."""
    for checkpoint in reversed(newest_first):
        try:
            lineage.note(run_directory, checkpoint)
        except OSError as problem:  # the next attempt finds them again
            notice(f"{run_directory}: the checkpoints that were found are not listed ({problem.strerror})")
            return
