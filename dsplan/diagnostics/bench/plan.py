"""The plan of a benchmark, point by point and run by run. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from dsplan.diagnostics.bench.cases import TrainingCase, training_cases
from hardware_db.errors import BrokenFile, DsplanError, UnknownName
from hardware_db.files import replace_text
from hardware_db.from_json import WrongValue, from_json
from hardware_db.handed_in import quote, read_yaml
from hardware_db.microbench.grid import CPU, GPU, KINDS, Block, Point, Scale, all_points, quick_points, unmeasurable
from planner import limits
from planner.errors import ContradictoryRequest
from planner.models.facts import ModelFacts
from planner.models.tasks import default_sequence_length
from planner.types.cluster import Cluster
from planner.vocabulary import Backend

TRAINING = "training"
_LONGEST = {"cpu": 256, "gpu": 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """Measurements to make on `device` (a catalogue's name, or cpu), in order; no `model`: the usual sizes."""

    device: str
    model: str = ""
    points: tuple[Point, ...] = ()
    training: tuple[TrainingCase, ...] = ()

    @property
    def most_ranks(self) -> int:
        """The most ranks that a point or a run takes."""
        return max((*(point.ranks for point in self.points), *(case.ranks for case in self.training)), default=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The extent of a benchmark.

    Raises:
        UnknownName: a kind is none.
    """

    ranks: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    """Words of `KINDS` and `training`; none for all."""
    model: ModelFacts | None = None
    """The model whose shapes count."""
    quick: bool = False
    """Whether the few rates of a first plan are enough."""
    deepspeed: bool = True
    """Whether DeepSpeed will be there."""

    def __post_init__(self) -> None:
        kinds = (*KINDS, TRAINING)
        for kind in self.kinds:
            if kind not in kinds:
                raise UnknownName("kind of benchmark", kind, kinds, hint=f"--only takes {', '.join(kinds)}")

    def takes(self, kind: str) -> bool:
        """Return whether a kind is measured."""
        return not self.kinds or kind in self.kinds


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read numbers of ranks from text such as `2,4`, ascending.

    Raises:
        DsplanError: a part is no number from 1 to 1024.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", part) and 1 <= int(part) <= limits.PROCESSES.most for part in parts):
        raise DsplanError(f"--ranks {quote(text)} is not a number of processes; write 2, or several as 2,4 (1 to 1024)")
    return tuple(sorted({int(part) for part in parts}))


def default_ranks(cluster: Cluster) -> tuple[int, ...]:
    """Return the usual numbers of ranks: two processes without a GPU, else every power of two of the node's GPUs."""
    if cluster.device.is_cpu:
        return (cluster.gpus_per_node,)
    most = cluster.gpus_per_node
    return tuple(sorted({most, *(1 << shift for shift in range(most.bit_length()) if 1 << shift <= most)}))


def make_bench_plan(wanted: Wanted, cluster: Cluster) -> BenchPlan:
    """Choose points and runs for one node of a cluster: the most telling points first, then runs, fewest ranks first.

    Raises:
        DsplanError: more ranks than a node has GPUs, or nothing is left to measure.
    """
    gpu = not cluster.device.is_cpu
    if gpu and max(wanted.ranks) > cluster.gpus_per_node:
        raise DsplanError(
            f"--ranks {max(wanted.ranks)} needs as many GPUs in one node and there are {cluster.gpus_per_node}; use"
            f" {cluster.gpus_per_node} or fewer"
        )
    points = tuple(dict.fromkeys(point for ranks in wanted.ranks for point in _points(wanted, cluster, ranks)))
    runs = _training(wanted, cluster) if wanted.takes(TRAINING) and not wanted.quick else ()
    if not points and not runs:
        raise DsplanError(
            f"--only {','.join(wanted.kinds)} leaves nothing to measure with these flags; name more kinds"
        )
    return BenchPlan(
        device=cluster.device.name, model=wanted.model.name if wanted.model else "", points=points, training=runs
    )


def _points(wanted: Wanted, cluster: Cluster, ranks: int) -> Iterator[Point]:
    scale = CPU if cluster.device.is_cpu else GPU
    blocks = () if wanted.model is None else tuple(blocks_of(wanted.model, scale))
    every = quick_points(scale, ranks) if wanted.quick else all_points(scale, ranks, blocks)
    operations = {name for kind, names in KINDS.items() if wanted.takes(kind) for name in names}
    # A GPU is a rank's own: most of what it does alone is measured once, with all of them at work. The operations of a
    # first plan are whole for every number, since the planner takes the rates of its own number where there are any.
    shared = set(KINDS["collectives"]) | {point.operation for point in quick_points(scale, ranks)}
    whole = not scale.gpu or ranks == max(wanted.ranks)
    return (point for point in every if point.operation in operations and (whole or point.operation in shared))


def blocks_of(facts: ModelFacts, scale: Scale) -> Iterator[Block]:
    """Yield the model's layers at one and at four samples of its usual length."""
    if not facts.hidden_size or not facts.num_heads:
        return
    length = min(default_sequence_length(facts), _LONGEST["gpu" if scale.gpu else "cpu"])
    block = Block(
        hidden=facts.hidden_size,
        intermediate=facts.moe_intermediate_size or facts.intermediate_size or 4 * facts.hidden_size,
        heads=facts.num_heads,
        head_width=facts.head_dim or facts.hidden_size // facts.num_heads,
        vocabulary=facts.vocab_size or facts.hidden_size,
        length=length,
    )
    yield from (block, replace(block, samples=4))


def _training(wanted: Wanted, cluster: Cluster) -> tuple[TrainingCase, ...]:
    """Choose the runs; DeepSpeed comes last for each number of ranks, as it needs processes of its own."""
    zero: Backend = "deepspeed" if wanted.deepspeed else "native"
    nodes = (_part_of_node(cluster, ranks) for ranks in wanted.ranks)
    cases = (case for node in nodes for case in training_cases(node, wanted.model, zero))
    return tuple(sorted(cases, key=lambda case: (case.ranks, case.needs_deepspeed)))


def _part_of_node(cluster: Cluster, ranks: int) -> Cluster:
    """Return so many devices of one node; processes without a device of their own share its memory."""
    part = replace(cluster, nodes=1, gpus_per_node=ranks)
    if not cluster.device.is_cpu:
        return part
    return replace(part, capacity_bytes=cluster.capacity_bytes * cluster.gpus_per_node // ranks)


# Benchmark plans as YAML files, written to be read and changed by people.
SCHEMA_VERSION = 1
_REMEDY = "write it anew with `dsplan bench --generate FILE`"

Value = TypeVar("Value")


def save_bench_plan(plan: BenchPlan, path: Path) -> None:
    """Write the plan as YAML, replacing the file in one step.

    Raises:
        BrokenFile: the file cannot be written.
    """
    import yaml

    document = {
        "schema_version": SCHEMA_VERSION,
        "device": plan.device,
        "model": plan.model,
        "points": [_without_defaults(point) for point in plan.points],
        "training": [
            {
                "model": case.model,
                "task": case.task,
                "config": dict(case.config),
                "plan": _without_defaults(case.configuration),
            }
            for case in plan.training
        ],
    }
    replace_text(path, yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None))


def load_bench_plan(path: Path) -> BenchPlan:
    """Read the plan in a YAML file.

    Raises:
        BrokenFile: the file cannot be read, or is no benchmark plan that this version understands; the place is named.
    """
    raw = read_yaml(path, _REMEDY)
    if not isinstance(raw, Mapping):
        raise BrokenFile(path, "is not a benchmark plan", _REMEDY)
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BrokenFile(path, f"has schema_version {version!r}, this dsplan reads {SCHEMA_VERSION}", _REMEDY)
    keys = ("schema_version", "device", "model", "points", "training")
    unknown = next((name for name in raw if name not in keys), None)
    if unknown is not None:
        raise BrokenFile(path, f"has an unknown key {unknown!r}; the keys are {', '.join(keys)}", _REMEDY)
    return BenchPlan(
        device=_text(raw.get("device"), f"{path}: device"),
        model=str(raw.get("model") or ""),
        points=_read_each(raw.get("points"), f"{path}: points", _read_point),
        training=_read_each(raw.get("training"), f"{path}: training", _read_case),
    )


def _read_each(raw: object, where: str, read: Callable[[Mapping[str, Any], str], Value]) -> tuple[Value, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(item, Mapping) for item in raw):
        raise BrokenFile(where, "is not a list of mappings", _REMEDY)
    return tuple(read(item, f"{where}, item {number}") for number, item in enumerate(raw, start=1))


def _read_point(raw: Mapping[str, Any], where: str) -> Point:
    point = _build(Point, raw, where)
    if not all(extent > 0 for extent in point.shape):
        raise BrokenFile(where, f"has shape {list(point.shape)}; it must be whole numbers above 0", _REMEDY)
    for name, figure, least in (("size", point.size, 0), ("ranks", point.ranks, 1)):
        if figure < least:
            raise BrokenFile(where, f"has {name} {figure}; it must be a whole number from {least}", _REMEDY)
    problem = unmeasurable(point)
    if problem:
        raise BrokenFile(where, problem, _REMEDY)
    return point


def _read_case(raw: Mapping[str, Any], where: str) -> TrainingCase:
    document = {"configuration" if name == "plan" else name: value for name, value in raw.items() if value is not None}
    return _build(TrainingCase, document, where, {"configuration": "plan"})


def _build(kind: type[Value], raw: object, where: str, spelled: Mapping[str, str] | None = None) -> Value:
    try:
        return from_json(kind, raw, spelled=spelled)
    except (WrongValue, ContradictoryRequest) as problem:
        raise BrokenFile(where, str(problem), _REMEDY) from None


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise BrokenFile(where, "is missing", _REMEDY)
    return value


def _without_defaults(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that have another value than their default."""
    defaults = {item.name: item.default for item in fields(value)}
    entries = {name: entry for name, entry in asdict(value).items() if entry != defaults[name]}
    return {name: list(entry) if isinstance(entry, tuple) else entry for name, entry in entries.items()}
