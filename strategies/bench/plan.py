"""BenchPlan: what a benchmark measures, point by point and run by run. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hardware_db.errors import DsplanError, UnknownName
from hardware_db.handed_in import shown
from hardware_db.microbench.grid import CPU, GPU, KINDS, Block, Scale, all_points, quick_points
from hardware_db.microbench.point import Point
from planner import limits
from planner.cluster import Cluster
from planner.models.facts import ModelFacts
from planner.models.tasks import default_sequence_length
from planner.vocabulary import Backend
from strategies.bench.case import TrainingCase
from strategies.bench.training_cases import training_cases

TRAINING = "training"
_LONGEST = {"cpu": 256, "gpu": 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What to measure on `device` (a catalogue's name, or cpu), in this order; `model` is empty for the usual sizes."""

    device: str
    model: str = ""
    points: tuple[Point, ...] = ()
    training: tuple[TrainingCase, ...] = ()

    @property
    def most_ranks(self) -> int:
        return max((*(point.ranks for point in self.points), *(case.ranks for case in self.training)), default=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What was asked of a benchmark: numbers of ranks, kinds (words of `KINDS` and `training`; none for all), the
    model whose shapes count, whether the few rates of a first plan are enough, and whether DeepSpeed will be there.

    Raises:
        UnknownName: a kind is none.
    """

    ranks: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    model: ModelFacts | None = None
    quick: bool = False
    deepspeed: bool = True

    def __post_init__(self) -> None:
        known = (*KINDS, TRAINING)
        for kind in self.kinds:
            if kind not in known:
                raise UnknownName("kind of benchmark", kind, known, hint=f"--only takes {', '.join(known)}")

    def takes(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks from text such as `2,4`, ascending.

    Raises:
        DsplanError: a part is no number from 1 to 1024.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", part) and 1 <= int(part) <= limits.PROCESSES.most for part in parts):
        raise DsplanError(f"--ranks {shown(text)} is not a number of processes; write 2, or several as 2,4 (1 to 1024)")
    return tuple(sorted({int(part) for part in parts}))


def default_ranks(cluster: Cluster) -> tuple[int, ...]:
    """What runs here without being asked: two processes without a GPU, else every power of two of the node's GPUs."""
    if cluster.device.is_cpu:
        return (cluster.gpus_per_node,)
    most = cluster.gpus_per_node
    return tuple(sorted({most, *(1 << shift for shift in range(most.bit_length()) if 1 << shift <= most)}))


def make_bench_plan(wanted: Wanted, cluster: Cluster) -> BenchPlan:
    """The points and runs for one node of a cluster, the most telling points first, then runs, fewest ranks first.

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
    """The model's layers at one and at four samples of its usual length."""
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
    """DeepSpeed comes last for each number of ranks: it needs processes of its own. Without it, ZeRO is our own."""
    zero: Backend = "deepspeed" if wanted.deepspeed else "native"
    nodes = (_part_of_node(cluster, ranks) for ranks in wanted.ranks)
    cases = (case for node in nodes for case in training_cases(node, wanted.model, zero))
    return tuple(sorted(cases, key=lambda case: (case.ranks, case.needs_deepspeed)))


def _part_of_node(cluster: Cluster, ranks: int) -> Cluster:
    """So many devices of one node; processes without a device of their own share its memory."""
    part = replace(cluster, nodes=1, gpus_per_node=ranks)
    if not cluster.device.is_cpu:
        return part
    return replace(part, capacity_bytes=cluster.capacity_bytes * cluster.gpus_per_node // ranks)
