"""Unlike parts of a step: groups of alike nodes, each with its share of the work, and the plan of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware_db.records import dataclass
from hardware_db.units import format_seconds
from planner import vocabulary as words
from planner.cluster.groups import all_like, name_group
from planner.cost.timing import throughput
from planner.search.estimate import Priced, plan_of
from planner.search.request import Request
from planner.types.cluster import Cluster
from planner.types.job import cluster_section
from planner.types.plan import Configuration, Plan, StepTime, Throughput


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A group of alike nodes, and the question if all nodes were like it."""

    group: Cluster
    request: Request


def kinds_of(request: Request) -> tuple[Kind, ...]:
    """Return the groups of a request's cluster in the order of their ranks.

    What is priced is remembered by the cluster it is on, so that there is one of each kind.
    """
    cluster = request.cluster
    return tuple(Kind(group=each, request=replace(request, cluster=all_like(cluster, each))) for each in cluster.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One group of alike nodes in a step, or those of its pipeline stages that have as many blocks."""

    group: Cluster
    samples: int
    """Of a micro-batch, on its fullest rank."""
    priced: Priced
    """As if all nodes were like it."""
    time: StepTime
    stages: range = range(1)
    """Stages of the pipeline that it has, or has a part of."""
    layers: int = 0
    """Blocks of each of these stages; 0 where stages are alike."""

    @property
    def at_work_seconds(self) -> float:
        """Seconds of a step in which its ranks wait for no other stage."""
        return self.time.step_seconds - self.time.bubble_seconds

    @property
    def pressure(self) -> float:
        """The share of a device's memory that is needed."""
        return self.priced.judgement.pressure

    def __str__(self) -> str:
        group, step = name_group(self.group), format_seconds(self.time.step_seconds)
        if not self.layers:
            return f"{self.samples} on each GPU of {group} ({step} a step)"
        first, last = self.stages[0], self.stages[-1]
        which = f"stage {first}" if first == last else f"stages {first} to {last}"
        return f"{self.layers} in {which} on {group} (at work for {format_seconds(self.at_work_seconds)} of a step)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A configuration whose ranks have unlike shares of a step, and what each group makes of it."""

    configuration: Configuration
    parts: tuple[Part, ...]

    @property
    def slowest(self) -> Part:
        """The part that the others wait for."""
        return max(self.parts, key=lambda part: part.time.step_seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.slowest.time.step_seconds

    def fits(self, request: Request) -> bool:
        """Return whether every part has the memory, as `has_room` says."""
        return all(has_room(part.priced, request) for part in self.parts)


def has_room(priced: Priced, request: Request) -> bool:
    """Return whether a part has the memory, with every margin unless the request goes to the limit."""
    judgement = priced.judgement
    return judgement.verdict != "does_not_fit" if request.to_the_limit else judgement.keeps_margins


def resized(layout: Configuration, micro_batch: int, accumulation: int) -> Configuration:
    """Return a layout with as many samples on each rank, and the global batch that follows from them."""
    ranks = layout.dims.data_parallel
    return replace(
        layout,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        global_batch_size=micro_batch * accumulation * ranks,
        micro_batches="",
    )


def plan_of_shared(request: Request, shared: Shared) -> Plan:
    """Return the plan: the time of the slowest part and the memory of the one that has least room."""
    slow, tight = shared.slowest, max(shared.parts, key=lambda part: part.pressure)
    base = plan_of(slow.priced, slow.time)
    is_tight = any(part.priced.judgement.verdict == "tight" for part in shared.parts)
    verdict: words.Verdict = "tight" if is_tight else "fits"
    what = "blocks of the pipeline's stages" if shared.configuration.layers_per_stage else "samples of a micro-batch"
    each = f"{what}: {'; '.join(map(str, shared.parts))}"
    alike = len({group.gpus_per_node for group in request.cluster.groups}) == 1
    by_hand = "" if alike else "nodes have unlike numbers of GPUs, which mpirun and srun start and dsplan run does not"
    return replace(
        base,
        configuration=shared.configuration,
        cluster={**cluster_section(request.cluster), "capacity_bytes": tight.priced.job.cluster.capacity_bytes},
        memory=tight.priced.memory,
        throughput=_throughput(request, shared, base.time),
        verdict=verdict,
        notes=tuple(dict.fromkeys(note for note in (each, by_hand, *base.notes) if note)),
    )


def _throughput(request: Request, shared: Shared, time: StepTime) -> Throughput:
    """Return the rates of all GPUs together; `mfu` is against the sum of their peaks."""
    part = shared.slowest
    alike = throughput(part.priced.job, time)
    share = request.workload.global_batch_size / part.priced.job.configuration.global_batch_size
    peak = None if alike.mfu is None else alike.tflops_per_gpu / alike.mfu
    rates = replace(
        alike,
        tokens_per_second_per_gpu=alike.tokens_per_second_per_gpu * share,
        samples_per_second=alike.samples_per_second * share,
        tflops_per_gpu=alike.tflops_per_gpu * share,
        mfu=None,
    )
    peaks = [_peak_tflops(other, time) for other in shared.parts]
    if peak is None or None in peaks:
        return rates
    devices = _devices(shared.parts)
    total = sum((own or 0.0) * share for own, share in zip(peaks, devices, strict=True))
    return replace(rates, mfu=rates.tflops_per_gpu * request.cluster.gpus / total)


def _peak_tflops(part: Part, time: StepTime) -> float | None:
    rates = throughput(part.priced.job, time)
    return None if not rates.mfu else rates.tflops_per_gpu / rates.mfu


def _devices(parts: Sequence[Part]) -> list[float]:
    """Return the GPUs of each part: of a group whose stages have unlike numbers of blocks, as many for each stage."""
    each = [float(part.group.gpus) for part in parts]
    if parts[0].layers:
        stages = [sum(len(other.stages) for other in parts if other.group is part.group) for part in parts]
        each = [own * len(part.stages) / of for own, part, of in zip(each, parts, stages, strict=True)]
    return each
