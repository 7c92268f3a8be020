"""ZeROOptimizer: data parallelism whose ranks each keep a part of the optimizer, the gradients, the parameters."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from dsplan.mpi.arrays import (
    Array,
    Form,
    Path,
    Tree,
    leaves,
    name_of,
    own_memory,
    rebuilt,
    subtree,
    values_of,
    write_into,
)
from dsplan.mpi.buckets import (
    BUCKET_BYTES,
    Bucket,
    Exchange,
    FlatLeaves,
    Leaf,
    checked_bucket_bytes,
    common_leaves,
    divided_buckets,
    whole_buckets,
)
from dsplan.mpi.communicator import Communicator
from dsplan.mpi.shards import Partitioning, Shard
from dsplan.mpi.sizes import AdamW, UpdateRule
from strategies.errors import CannotRun

if TYPE_CHECKING:
    from mpi4py import MPI

    from dsplan.mpi.communicator import PerformanceMonitor


class ReducedGradients(Mapping[str, Array]):
    """Averaged gradients by name (`blocks/0/weight`): whole in stage 1, this rank's run, flat, in stages 2 and 3.

    `+` joins the gradients of other layers and adds those of another micro-batch; `scaled` divides them by how many
    there were. They are fp32, or fp64 where the parameter is.
    """

    def __init__(self, parts: Mapping[Path, Array], *, divided: bool) -> None:
        self.parts, self.divided = dict(parts), divided
        self._paths = {name_of(path): path for path in self.parts}

    @property
    def bytes(self) -> int:
        """Bytes on this rank."""
        return sum(part.nbytes for part in self.parts.values())

    def scaled(self, factor: float) -> ReducedGradients:
        """Return the same, times a factor."""
        return ReducedGradients({path: part * factor for path, part in self.parts.items()}, divided=self.divided)

    def __add__(self, other: ReducedGradients) -> ReducedGradients:
        both = self.parts | other.parts
        for path in self.parts.keys() & other.parts.keys():
            both[path] = self.parts[path] + other.parts[path]
        return ReducedGradients(both, divided=self.divided)

    def __getitem__(self, name: str) -> Array:
        return self.parts[self._paths[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self.parts)


class ZeROStage(IntEnum):
    """Partitioned states (Rajbhandari et al. 2020, arXiv:1910.02054)."""

    STAGE_1 = 1
    """The optimizer's states."""
    STAGE_2 = 2
    """Gradients too."""
    STAGE_3 = 3
    """Parameters too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeROMemory:
    """Bytes on this rank: states and masters, and what stage 3 keeps of the parameters (its masters)."""

    optimizer_bytes: int
    parameters_bytes: int


class ZeROOptimizer:
    """ZeRO on bare parameters, a tree of numpy arrays or torch tensors; all ranks call each method together.

        optimizer = ZeROOptimizer(MPI.COMM_WORLD, ZeROStage.STAGE_2, learning_rate=0.001)
        optimizer.register_parameters(parameters)
        for batch in batches:
            reduced = optimizer.reduce_gradients(gradients_of(parameters, batch))
            parameters = optimizer.step(parameters, reduced)

    In stage 3 `register_parameters` keeps this rank's run of each parameter, so the tree can be dropped:
    `gather_parameters` brings one layer together when it is needed, and `step(None, reduced)` leaves all partitioned.

    Args:
        dp_comm: the ranks that hold the same parameters; None: all ranks.
        learning_rate: of the next step; the attribute may be set between steps.
        rule: how a step changes parameters; None: Adam with torch's defaults.
        bucket_bytes: the size of a message.
        monitor: gets the time of every collective.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: an argument is of no use; all methods raise it on all ranks where trees differ between ranks.
    """

    def __init__(
        self,
        dp_comm: MPI.Comm | None,
        stage: ZeROStage | int,
        learning_rate: float,
        *,
        rule: UpdateRule | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        monitor: PerformanceMonitor | None = None,
    ) -> None:
        self._communicator = Communicator(dp_comm, monitor)
        self.stage = _checked_stage(stage)
        self.learning_rate = learning_rate
        self.rule = AdamW() if rule is None else rule
        self._bucket_bytes = checked_bucket_bytes(bucket_bytes)
        self._shards: dict[Path, Shard] = {}
        self._tree: Tree = None

    def register_parameters(self, parameters: Tree) -> None:
        """Begin with these parameters; called once more, it begins anew, with states of zero.

        Raises:
            CannotRun: a parameter is not floating-point, or ranks hold different values.
        """
        common = common_leaves(
            self._communicator, parameters, Exchange(action="register_parameters", require=_require_floating)
        )
        self._communicator.require_same("register_parameters", lambda: common, _value_words)
        partitioning = Partitioning(
            rank=self._communicator.rank,
            ranks=self._communicator.size,
            partitioned=self._partitioned,
            states=self.rule.states,
        )
        self._shards = {leaf.path: partitioning.shard(leaf.path, _form(leaf), leaf.value) for leaf in common}
        self._tree = rebuilt(parameters, lambda path: None)

    def reduce_gradients(self, gradients: Tree) -> ReducedGradients:
        """Average over ranks and, from stage 2 on, keep this rank's runs alone.

        `gradients` may hold some of the layers, so that those of one layer can be given away while backward continues
        with the next: add up what is returned. A leaf may be None on some ranks; it counts as zero there.

        Raises:
            CannotRun: a gradient is of no registered parameter, or of another shape.
        """
        common = common_leaves(
            self._communicator, gradients, Exchange(action="reduce_gradients", require=self._require_known)
        )
        present = [leaf for leaf in common if leaf.form is not None]
        shards = [self._shards[leaf.path] for leaf in present]
        flats = FlatLeaves([leaf.value for leaf in present])
        divided = self.stage >= ZeROStage.STAGE_2
        lengths = [shard.stop - shard.start if divided else shard.form.count for shard in shards]
        out = [np.empty(length, dtype=shard.form.reduce_dtype) for length, shard in zip(lengths, shards, strict=True)]
        for bucket in self._buckets(shards, [shard.form.reduce_dtype for shard in shards], divided=divided):
            self._reduce(bucket, bucket.filled(flats.of(bucket)), _Targets(flats=out, shards=shards, divided=divided))
        shapes = [(-1,) if divided else shard.form.shape for shard in shards]
        return ReducedGradients(
            {shard.path: values.reshape(shape) for shard, values, shape in zip(shards, out, shapes, strict=True)},
            divided=divided,
        )

    def norm(self, reduced: ReducedGradients) -> float:
        """Return the 2-norm of all gradients over all ranks; not finite where any of them is not."""
        square = np.zeros(1)
        for path, part in reduced.parts.items():
            run = self._own_run(path, part)
            square += np.dot(run, run) if run.dtype == np.float64 else np.square(run, dtype=np.float64).sum()
        self._communicator.all_reduce(square)
        return math.sqrt(square[0]) if square[0] >= 0 else math.nan

    def step(
        self, parameters: Tree, reduced: ReducedGradients, *, clip_norm: float | None = None, in_place: bool = False
    ) -> Tree:
        """Update this rank's runs of the parameters that have gradients, and give every rank all of them.

        Args:
            parameters: the tree as the last step returned it; changes that the script has made since are kept. None in
                stage 3: the parameters stay partitioned, and None is returned.
            reduced: the gradients that `reduce_gradients` returned.
            clip_norm: gradients are scaled down to this norm where theirs is larger.
            in_place: write into the arrays of `parameters`, and return the same tree; otherwise they are not changed.

        Raises:
            CannotRun: the parameters are not those that were registered.
        """
        whole = self._communicator.require_same(
            "step",
            lambda: self._checked(parameters, reduced, in_place),
            lambda _: (f"clip_norm {clip_norm}, in_place {in_place}", *reduced),
        )
        factor = 1.0
        if clip_norm is not None:
            if not clip_norm > 0:
                raise CannotRun(f"step: clip_norm is {clip_norm}; it must be a number above 0")
            factor = min(1.0, clip_norm / (self.norm(reduced) + 1e-6))
        fresh = {path: self._updated(path, part, whole, factor) for path, part in reduced.parts.items()}
        if whole is None:
            return None
        gathered = self._all_gathered(fresh, whole if in_place else None)
        return parameters if in_place else rebuilt(parameters, lambda path: gathered.get(path, whole[path]))

    def gather_parameters(self, *keys: str | int) -> Tree:
        """Return the parameters at some keys, whole, in new arrays: `gather_parameters("blocks", 3)`; without any: all.

        Raises:
            CannotRun: the stage is not 3, or there are none at these keys.
        """

        def there() -> Tree:
            if not self._partitioned:
                raise CannotRun(f"stage {self.stage:d} leaves parameters whole with the script; only stage 3 has parts")
            return subtree(self._tree, keys)

        wanted = self._communicator.require_same("gather_parameters", there, lambda _: [name_of(keys)])
        paths = {path: (*keys, *path) for path in leaves(wanted)}
        masters = {path: self._shards[path].master for path in paths.values()}
        gathered = self._all_gathered({path: value for path, value in masters.items() if value is not None}, None)
        return rebuilt(wanted, lambda path: gathered[paths[path]])

    def memory(self) -> ZeROMemory:
        """Return what this rank keeps."""
        masters = sum(shard.master.nbytes for shard in self._shards.values() if shard.master is not None)
        parameters = masters if self._partitioned else 0
        whole = sum(shard.bytes for shard in self._shards.values())
        return ZeROMemory(optimizer_bytes=whole - parameters, parameters_bytes=parameters)

    def state(self) -> dict[str, Any]:
        """For `CheckpointManager.save_checkpoint`: this rank's parts, which any number of ranks can load."""
        return {"rule": self.rule.name, "parameters": {shard.name: shard.state() for shard in self._shards.values()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, as `CheckpointManager.load_checkpoint` returns it, under any stage and number of ranks.

        Raises:
            CannotRun: it is of other parameters or of another rule; nothing is changed.
        """

        def loaded() -> dict[Path, Shard]:
            if state.get("rule") != self.rule.name:
                raise CannotRun(f"the checkpoint's rule is {state.get('rule')!r}, this optimizer's {self.rule.name!r}")
            saved = state.get("parameters", {})
            missing = [shard.name for shard in self._shards.values() if shard.name not in saved]
            if missing or not self._shards:
                what = repr(missing[0]) if missing else "anything: call register_parameters first"
                raise CannotRun(f"load_state: the checkpoint and the registered parameters do not share {what}")
            return {path: shard.loaded(saved[shard.name]) for path, shard in self._shards.items()}

        self._shards, _ = self._communicator.compare(loaded, lambda _: ())

    @property
    def _partitioned(self) -> bool:
        return self.stage == ZeROStage.STAGE_3

    def _buckets(self, shards: Sequence[Shard], dtypes: Sequence[np.dtype[Any]], *, divided: bool) -> list[Bucket]:
        counts = [shard.form.count for shard in shards]
        if divided:
            return divided_buckets(counts, dtypes, self._bucket_bytes, self._communicator.size)
        return whole_buckets(counts, dtypes, self._bucket_bytes)

    def _reduce(self, bucket: Bucket, buffer: Array, targets: _Targets) -> None:
        """Average a bucket, and put what this rank keeps of it where it belongs."""
        if not targets.divided:
            self._communicator.all_reduce(buffer)
            bucket.spread(np.divide(buffer, self._communicator.size, out=buffer), targets.flats)
            return
        own = self._communicator.reduce_scatter(buffer, bucket.counts)
        own /= self._communicator.size
        for run in bucket.runs_of(self._communicator.rank):
            begin = targets.shards[run.leaf].start
            targets.flats[run.leaf][run.start - begin : run.stop - begin] = own[run.elements]

    def _updated(self, path: Path, part: Array, whole: Mapping[Path, Any] | None, factor: float) -> Array:
        """Return this rank's run of a parameter after the step."""
        shard = self._shards[path]
        run = self._own_run(path, part)
        value = shard.current(None if whole is None else whole[path])
        shard.step += 1
        gradient = run if factor == 1.0 else run * np.asarray(factor, dtype=run.dtype)
        self.rule.update(value, gradient, shard.states, shard.step, self.learning_rate)
        return value

    def _own_run(self, path: Path, part: Array) -> Array:
        shard = self._shards[path]
        flat = part.reshape(-1)
        return flat if self.stage >= ZeROStage.STAGE_2 else flat[shard.start : shard.stop]

    def _all_gathered(self, fresh: Mapping[Path, Array], into: Mapping[Path, Any] | None) -> dict[Path, Any]:
        """Whole parameters from every rank's runs: new leaves, or the values of those in `into`."""
        shards = [self._shards[path] for path in fresh]
        own = [None if into is None else own_memory(into[path]) for path in fresh]
        flats = [
            np.empty(shard.form.count, dtype=shard.form.transfer_dtype) if memory is None else memory
            for shard, memory in zip(shards, own, strict=True)
        ]
        values = list(fresh.values())
        for bucket in self._buckets(shards, [shard.form.transfer_dtype for shard in shards], divided=True):
            part = np.empty(bucket.counts[self._communicator.rank], dtype=bucket.dtype)
            for run in bucket.runs_of(self._communicator.rank):
                begin = shards[run.leaf].start
                part[run.elements] = values[run.leaf][run.start - begin : run.stop - begin]
            bucket.spread(self._communicator.all_gather(part, bucket.counts), flats)
        if into is None:
            return {shard.path: shard.form.leaf_of(flat) for shard, flat in zip(shards, flats, strict=True)}
        for shard, memory, flat in zip(shards, own, flats, strict=True):
            if memory is None:
                write_into(into[shard.path], flat, shard.name)
        return {}

    def _require_known(self, path: Path, form: Form) -> None:
        shard = self._shards.get(path)
        if shard is None:
            names = ", ".join(registered.name for registered in list(self._shards.values())[:8]) or "none"
            raise CannotRun(f"{name_of(path)!r} is no registered parameter; registered: {names}")
        if shard.form.shape != form.shape or not form.is_floating:
            raise CannotRun(f"the gradient of {shard.name!r} is {form}, the parameter {shard.form}; shapes must match")

    def _checked(self, parameters: Tree, reduced: ReducedGradients, in_place: bool) -> dict[Path, Any] | None:
        """Return the leaves of `parameters`, when a step can be made with these arguments."""
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise CannotRun(f"learning_rate is {self.learning_rate}; it must be a number of at least 0")
        if reduced.divided != (self.stage >= ZeROStage.STAGE_2) or reduced.parts.keys() - self._shards.keys():
            raise CannotRun(
                "step: these gradients were not reduced by this optimizer; give what its reduce_gradients returns"
            )
        if parameters is None and not self._partitioned:
            raise CannotRun(f"step: parameters is None, and stage {self.stage:d} keeps none; give them")
        if parameters is None:
            return None
        whole = leaves(parameters)
        if whole.keys() != self._shards.keys():
            raise CannotRun("step: these are not the parameters that were registered; call register_parameters again")
        for path, shard in self._shards.items():
            shape = getattr(whole[path], "shape", ())
            if tuple(shape) != shard.form.shape:
                raise CannotRun(
                    f"step: {shard.name!r} has shape {list(shape)}; {list(shard.form.shape)} was registered"
                )
            if in_place and not hasattr(whole[path], "__setitem__"):
                raise CannotRun(f"step: {shard.name!r} cannot be written in place; leave in_place out")
        return whole


@dataclass(frozen=True, kw_only=True, slots=True)
class _Targets:
    """Targets of averaged gradients: flat arrays, whole or this rank's runs of `shards`."""

    flats: Sequence[Array]
    shards: Sequence[Shard]
    divided: bool


def _checked_stage(stage: ZeROStage | int) -> ZeROStage:
    try:
        return ZeROStage(stage)
    except ValueError:
        raise CannotRun(f"stage is {stage!r}; it is ZeROStage.STAGE_1, STAGE_2 or STAGE_3") from None


def _require_floating(path: Path, form: Form) -> None:
    if not form.is_floating:
        raise CannotRun(f"the parameter {name_of(path)!r} is of {form.word}; only floating-point ones are trained")


def _form(leaf: Leaf) -> Form:
    if leaf.form is None:
        raise CannotRun(f"the parameter {leaf.name!r} is None; leave it out")
    return leaf.form


def _value_words(common: Sequence[Leaf]) -> list[str]:
    """Each parameter with a checksum of its values."""
    words = []
    for leaf in common:
        _form(leaf)
        sum_of_values = zlib.crc32(np.ascontiguousarray(values_of(leaf.value)).reshape(-1).view(np.uint8).data)
        words.append(f"{leaf.name} with checksum {sum_of_values:08x}")
    return words
