"""CheckpointManager: trees of arrays by step, complete or not there, for any number of ranks.

directory/latest                    the name of the newest checkpoint
directory/step-00001000/            one checkpoint; its files never change once the folder has this name
    index.json                      the nesting of every rank's tree, and where each array lies
    rank-00000.safetensors          what rank 0 wrote
directory/.step-00002000.tmp/       one that is being written, or that a crash left behind
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplan.mpi import files
from dsplan.mpi.arrays import Array, Tree, form_of, leaves, name_of, values_of
from dsplan.mpi.communicator import Communicator
from dsplan.mpi.files import Part
from dsplan.mpi.layout import Layout, TreeDescription, describe, file_of, lay_out
from dsplan.mpi.reading import INDEX, VERSION, SavedTree
from strategies.checkpoint import retention
from strategies.errors import BrokenFile, CannotRun, DsplanError

if TYPE_CHECKING:
    from mpi4py import MPI

    from dsplan.mpi.communicator import PerformanceMonitor


class CheckpointManager:
    """Checkpoints of the ranks of a communicator below one directory that all of them see.

        checkpoints = CheckpointManager(MPI.COMM_WORLD, "/path/to/checkpoints")
        checkpoints.save_checkpoint({"model": parameters, "optimizer": optimizer.state()}, step=1000)
        state = checkpoints.load_checkpoint(step=1000)

    A state is a nesting of dicts, lists and tuples of arrays, torch tensors, `Part`s, numbers, texts and None.
    What is the same on several ranks is written once, by one of them, so each rank writes a part; what differs is kept
    for each rank; `Part`s are put together. Nothing is pickled.

    Args:
        comm: the ranks; None: all.
        keep_last: how many of the newest stay; None: all.
        monitor: gets the time of every collective.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: keep_last is below 1.
    """

    def __init__(
        self,
        comm: MPI.Comm | None,
        directory: str | Path,
        *,
        keep_last: int | None = None,
        monitor: PerformanceMonitor | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CannotRun(f"keep_last={keep_last} keeps no checkpoint; it must be at least 1")
        self._communicator = Communicator(comm, monitor)
        self.directory, self._keep_last = Path(directory), keep_last

    def save_checkpoint(self, model_state: Tree, step: int) -> Path:
        """Save; all ranks call it together. Returns its folder when it is complete. An older one of the step goes.

        Raises:
            CannotRun: a leaf cannot be stored, or the parts of an array do not make it up; all ranks raise.
            BrokenFile: the directory cannot be written; the checkpoints that were there still are; all ranks raise.
        """
        own = self._communicator.require_same(
            "save_checkpoint", lambda: _described(model_state, step), lambda _: [f"step {step} below {self.directory}"]
        )
        descriptions = self._communicator.gather_objects(0, own)
        layout: Layout
        layout, name = self._from_root(lambda: self._begun(descriptions or [], step))
        temporary = retention.temporary(self.directory, name)
        try:
            self._together(lambda: _write(temporary, model_state, layout, self._communicator.rank))
            self._from_root(lambda: self._published(name, _index(descriptions or [], layout, step)))
        except DsplanError:
            if self._communicator.rank == 0:
                retention.discard(self.directory, name)
            raise
        complete: Path = self.directory / str(name)
        return complete

    def load_checkpoint(self, step: int | None = None, *, like: Tree = None) -> Tree:
        """Return the state of a step; None: of the latest. All ranks call it together.

        As many ranks as saved it get each what it gave, others the names of all ranks together. Arrays come back whole,
        in numpy (bfloat16 as fp32).

        Args:
            step: the step to load; None: the latest.
            like: load only the leaves of this tree, each as its leaf is: a torch tensor of that dtype on that device,
                or that `Part` of the array.

        Raises:
            BrokenFile: there is no such checkpoint, or it is damaged; all ranks raise.
            CannotRun: `like` does not fit it, or ranks held different values of a leaf and other ranks load them.
        """
        self._communicator.require_same(
            "load_checkpoint", lambda: None, lambda _: [f"step {step} below {self.directory}"]
        )
        name = self._from_root(lambda: self._folder_of(step))

        def loaded() -> Tree:
            saved = SavedTree(self.directory / name, self._communicator.rank, self._communicator.size)
            return saved.whole() if like is None else saved.like(like)

        return self._together(loaded)

    def steps(self) -> list[int]:
        """Return the steps that can be loaded, the lowest first."""
        return sorted({_step_of(path) for path in retention.published(self.directory)})

    def latest_step(self) -> int | None:
        """Return the step of the checkpoint that was saved last, or None if there is none."""
        latest = retention.named_latest(self.directory)
        return None if latest is None else _step_of(latest)

    def _begun(self, descriptions: list[TreeDescription], step: int) -> tuple[Layout, str]:
        """On rank 0: who writes what, and the folder's name."""
        layout = lay_out([description.arrays for description in descriptions])
        return layout, retention.begin(self.directory, step)

    def _published(self, name: str, index: Mapping[str, Any]) -> None:
        """On rank 0: check that every rank's file is in the folder, and give it its name."""
        temporary = retention.temporary(self.directory, name)
        for rank in {
            piece["file"]
            for variants in index["arrays"].values()
            for variant in variants
            for piece in variant["pieces"]
        }:
            if not (temporary / rank).exists():
                raise BrokenFile(self.directory, f"rank 0 does not see {rank}", "name a directory that all ranks share")
        retention.write_text(temporary / INDEX, json.dumps(index))
        retention.publish(self.directory, name, self._keep_last)

    def _folder_of(self, step: int | None) -> str:
        """On rank 0: the name of a step's folder."""
        latest = retention.named_latest(self.directory)
        if step is None and latest is not None:
            return latest.name
        names = [path.name for path in retention.published(self.directory) if _step_of(path) == step]
        if not names:
            there = ", ".join(map(str, self.steps())) or "none"
            raise BrokenFile(self.directory, f"has no checkpoint of step {step}; there are: {there}")
        return names[0]

    def _from_root(self, action: Callable[[], Any]) -> Any:
        """Return what `action` returns on rank 0, on every rank; every rank raises what it raises."""
        result = self._together(lambda: action() if self._communicator.rank == 0 else None)
        return self._communicator.broadcast_object(0, result)

    def _together(self, action: Callable[[], Any]) -> Any:
        """Return what `action` returns, when it fails on no rank."""

        def attempted() -> Any:
            try:
                return action()
            except OSError as problem:
                reason = problem.strerror or str(problem)
                raise BrokenFile(
                    self.directory, f"cannot be used ({reason})", "make room, or name another directory"
                ) from None

        result, _ = self._communicator.compare(attempted, lambda _: ())
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """The values of a leaf, made when they are written."""

    value: Any

    def __call__(self) -> Array:
        return values_of(self.value)


def _described(state: Tree, step: int) -> TreeDescription:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CannotRun(f"save_checkpoint: step is {step!r}; it must be a whole number of at least 0")
    return describe(state)


def _write(temporary: Path, state: Tree, layout: Layout, rank: int) -> None:
    """Write this rank's file; none where it has nothing to write."""
    by_name = {name_of(path): value for path, value in leaves(state).items()}
    stored = []
    for key, name in layout.writes[rank].items():
        value = by_name[name].values if isinstance(by_name[name], Part) else by_name[name]
        form = form_of(value, name)
        stored.append(files.FileArray(key=key, word=form.word, shape=form.shape, values=_Piece(value=value)))
    if stored:
        files.write(temporary / file_of(rank), stored)


def _index(descriptions: list[TreeDescription], layout: Layout, step: int) -> dict[str, Any]:
    texts = [json.dumps(description.structure) for description in descriptions]
    distinct = list(dict.fromkeys(texts))
    return {
        "version": VERSION,
        "step": step,
        "world_size": len(descriptions),
        "structures": [json.loads(text) for text in distinct],
        "structure_of_rank": [distinct.index(text) for text in texts],
        "arrays": layout.arrays,
    }


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])
