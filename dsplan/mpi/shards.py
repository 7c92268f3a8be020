"""A rank's shard of one parameter: its run of the master weights, if any, and of the optimizer's states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsplan.mpi.arrays import Array, Form, Path, name_of, run_of
from dsplan.mpi.buckets import bounds
from dsplan.mpi.files import Part
from strategies.errors import CannotRun

MASTER, STEP = "master", "step"


@dataclass(kw_only=True, slots=True)
class Shard:
    """Elements `start` to `stop` of the flattened parameter are this rank's.

    `master` has their values in `Form.reduce_dtype`: always if the parameter itself is partitioned, else only
    if that is more precise than the parameter. `step` counts the updates.
    """

    path: Path
    form: Form
    start: int
    stop: int
    master: Array | None = None
    states: dict[str, Array] = field(default_factory=dict)
    step: int = 0

    @property
    def name(self) -> str:
        """The path as messages write it."""
        return name_of(self.path)

    @property
    def bytes(self) -> int:
        """Bytes of the states and the master."""
        return sum(array.nbytes for array in self._arrays().values())

    def current(self, given: Any) -> Array:
        """Return this rank's values before a step, to be changed in place; `given` is the whole parameter, or None.

        What the script changed in the parameter since the last step is taken over into the master.
        """
        if self.master is None:
            return np.array(run_of(given, self.start, self.stop), dtype=self.form.reduce_dtype)
        if given is not None:
            now = run_of(given, self.start, self.stop)
            changed = now != self.form.rounded(self.master)
            self.master[changed] = now[changed]
        return self.master

    def state(self) -> dict[str, Part | int]:
        """Return the step and each array as a part of the whole, for a checkpoint."""
        arrays = self._arrays().items()
        return {STEP: self.step} | {
            name: Part(values=values, shape=self.form.shape, start=self.start) for name, values in arrays
        }

    def loaded(self, state: Mapping[str, Any]) -> Shard:
        """Return this shard with a checkpoint's values; the master stays if the checkpoint has none.

        Raises:
            CannotRun: a state is missing or is of another size.
        """
        arrays = {name: self._cut(name, state) for name in self._arrays() if name != MASTER or MASTER in state}
        if not isinstance(state.get(STEP), int):
            raise CannotRun(f"the checkpoint has no {STEP!r} of {self.name!r}; it is not an optimizer's state")
        return Shard(
            path=self.path,
            form=self.form,
            start=self.start,
            stop=self.stop,
            master=arrays.pop(MASTER, self.master),
            states=arrays,
            step=state[STEP],
        )

    def _arrays(self) -> dict[str, Array]:
        return self.states if self.master is None else {**self.states, MASTER: self.master}

    def _cut(self, name: str, state: Mapping[str, Any]) -> Array:
        value = state.get(name)
        if value is None:
            raise CannotRun(f"the checkpoint has no {name!r} of {self.name!r}; was it saved under another rule?")
        if isinstance(value, Part):
            run = value.values if (value.start, value.values.size) == (self.start, self.stop - self.start) else None
        else:
            run = run_of(value, self.start, self.stop) if np.size(value) == self.form.count else None
        if run is None:
            raise CannotRun(f"{name!r} of {self.name!r} in the checkpoint is not of {self.form.count} elements")
        return np.array(run, dtype=self.form.reduce_dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitioning:
    """Return rank, number of ranks, whether parameters are partitioned, and the names of the rule's states."""

    rank: int
    ranks: int
    partitioned: bool
    states: tuple[str, ...]

    def shard(self, path: Path, form: Form, value: Any) -> Shard:
        """Return this rank's shard of a parameter that begins with `value`."""
        start, stop = bounds(form.count, self.ranks, self.rank)
        keeps = self.partitioned or form.transfer_dtype != form.reduce_dtype or form.word == "bfloat16"
        return Shard(
            path=path,
            form=form,
            start=start,
            stop=stop,
            master=np.array(run_of(value, start, stop), dtype=form.reduce_dtype) if keeps else None,
            states={name: np.zeros(stop - start, dtype=form.reduce_dtype) for name in self.states},
        )
