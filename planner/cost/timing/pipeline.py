"""The time of a pipeline: its schedule, run through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware_db.records import dataclass
from planner.cost.memo import memo_by_fields
from planner.cost.precision import Recipe, recipe_of
from planner.cost.split import attention_exchange, attention_widths, blocks_per_stage
from planner.cost.timing.collectives import (
    Collective,
    collective_seconds,
    dispatch_seconds,
    group,
    neighbour_seconds,
)
from planner.cost.timing.compute import NOTHING, Passes, block_passes, head_passes
from planner.cost.timing.efficiency import ATTENTION_BACKWARD, DeviceRates
from planner.cost.timing.flops import executed_layers, geometry, job_stacks, recomputed_share
from planner.cost.timing.layout import Layout, beside
from planner.models.facts import ModelFacts
from planner.types.job import Job

# Communication inside the blocks of one micro-batch: of tensor, context and expert parallelism.


REDUCTIONS_EACH_WAY = 2
"""All-reduces of a block's forward, and of its backward: one for attention, one for the MLP (Megatron-LM, arXiv
1909.08053). Sequence parallelism puts an all-gather and a reduce-scatter in the place of each: the same bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Seconds of one rank's collectives in the forward and in the backward of one micro-batch that nothing hides.

    `hidden` are those of collectives that run beside compute.
    """

    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0

    @property
    def visible(self) -> float:
        """Seconds that nothing hides."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """Seconds of all."""
        return self.visible + self.hidden

    def __add__(self, other: Exchanges) -> Exchanges:
        return Exchanges(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            hidden=self.hidden + other.hidden,
        )


def exchanges(job: Job, where: Layout, stage: Stage, rates: DeviceRates) -> Exchanges:
    """Return what the ranks that share a micro-batch exchange for it. Full recomputation repeats the forward's."""
    chosen = job.configuration
    exchanges = Exchanges()
    if chosen.tp > 1:
        exchanges += _tensor_parallel(job, where, rates)
    if chosen.cp > 1:
        exchanges += _context_parallel(job, where, stage, rates)
    if chosen.ep > 1:
        exchanges += _expert_parallel(job, where, stage, rates)
    return exchanges


def _tensor_parallel(job: Job, where: Layout, rates: DeviceRates) -> Exchanges:
    """All-reduces of activations over the tp ranks."""
    configuration = job.configuration
    size = job.tokens_per_micro_batch * job.facts.hidden_size * rates.element_bytes
    members = group(job.cluster, configuration.tp, 1)
    names: tuple[Collective, ...] = (
        ("all_gather", "reduce_scatter") if configuration.sequence_parallel else ("all_reduce",)
    )
    one = sum(collective_seconds(job.cluster, name, size, members) for name in names)
    each_way = where.layers * REDUCTIONS_EACH_WAY
    repeated, share = 0.0, recomputed_share(job)
    if configuration.activation_checkpointing == "full":
        # What comes out of the MLP is not needed again.
        repeated = share * (each_way // 2 if rates.code.stops_early else each_way)
    # One more each way: for the embedding's output, and for the gradient that leaves the head.
    visible = 1 - rates.code.hidden_tensor_parallel
    forward, backward = (each_way + 1) * one, (each_way + repeated + 1) * one
    return Exchanges(
        forward=visible * forward, backward=visible * backward, hidden=(1 - visible) * (forward + backward)
    )


def _context_parallel(job: Job, where: Layout, stage: Stage, rates: DeviceRates) -> Exchanges:
    """Keys and values of the whole sample to the queries of every cp rank, and their gradients back.

    All-gathered, they arrive beside the attention of the rank's own keys; around a ring each part arrives beside the
    attention of the one before it. Exchanged heads wait.
    """
    chosen, cp = job.configuration, job.configuration.cp
    queries, keys = attention_widths(job.facts, chosen.tp)
    tokens = chosen.micro_batch_size * chosen.sequence_length
    members = group(job.cluster, cp, chosen.tp)
    again = 1 + recomputed_share(job)
    exchange = attention_exchange(job)
    if exchange == "all-to-all":
        part = tokens / cp * rates.element_bytes
        one = sum(
            collective_seconds(job.cluster, "all_to_all", part * width, members) for width in (queries + keys, queries)
        )
        return Exchanges(forward=where.layers * one, backward=where.layers * again * one)
    size = tokens * keys * rates.element_bytes
    gather = collective_seconds(job.cluster, "all_gather", size, members)
    scatter = collective_seconds(job.cluster, "reduce_scatter", size, members)
    covered = 1 / cp if exchange == "all-gather" else (cp - 1) / cp
    attention = covered * stage.block.attention
    forward = where.layers * max(0.0, gather - attention)
    backward = where.layers * max(0.0, gather + scatter - ATTENTION_BACKWARD * attention)
    backward += (again - 1) * forward
    total = where.layers * ((1 + again) * gather + scatter)
    return Exchanges(forward=forward, backward=backward, hidden=total - forward - backward)


def _expert_parallel(job: Job, where: Layout, stage: Stage, rates: DeviceRates) -> Exchanges:
    """Return the seconds of sending tokens to the ranks of their experts and back (GShard, arXiv 2006.16668).

    The busiest rank gets more than the mean. Where a code base sends the tokens of one micro-batch beside the compute
    of another, what compute takes longer than is hidden.
    """
    facts, one = job.facts, _dispatch(job, rates)
    each_way = 2 * where.layers * (1 - facts.first_k_dense / max(facts.num_layers, 1)) * one
    again = 1 + recomputed_share(job)
    forward, backward = each_way, again * each_way
    if not _overlaps_dispatch(job, rates):
        return Exchanges(forward=forward, backward=backward)
    visible = Exchanges(forward=beside(stage.forward, forward), backward=beside(stage.backward, backward))
    return replace(visible, hidden=max(0.0, forward + backward - visible.visible))


def _dispatch(job: Job, rates: DeviceRates) -> float:
    """Return the seconds of one exchange of a block's tokens."""
    chosen, facts = job.configuration, job.facts
    tokens = job.tokens_per_micro_batch / (chosen.tp if chosen.sequence_parallel else 1)
    size = tokens * facts.hidden_size * rates.element_bytes
    copies = job.workload.expert_imbalance * facts.experts_per_token
    members = group(job.cluster, chosen.ep, 1)
    if rates.code.dispatches_by_node and members.nodes > 1:
        return dispatch_seconds(job.cluster, size, copies, _other_nodes(facts, members.nodes), members)
    return collective_seconds(job.cluster, "all_to_all", size * copies, members)


def _other_nodes(facts: ModelFacts, nodes: int) -> float:
    """Return how many nodes beside its own a token is sent to on average, whose experts are picked evenly.

    A router that picks groups of experts first keeps a token within the nodes of these.
    """
    allowed = float(nodes)
    if facts.expert_groups > 1:
        allowed = min(allowed, facts.groups_per_token * max(1.0, nodes / facts.expert_groups))
    reached = allowed * (1 - (1 - 1 / allowed) ** facts.experts_per_token)
    return reached * (nodes - 1) / nodes


def _overlaps_dispatch(job: Job, rates: DeviceRates) -> bool:
    """Return whether tokens travel beside compute: always, or in a pipeline of several stages per rank."""
    overlap = rates.code.overlaps_dispatch
    return overlap == "always" or (overlap == "interleaved" and job.configuration.virtual_stages > 1)


def boundary_seconds(job: Job, rates: DeviceRates) -> float:
    """One activation sent from a pipeline stage to the next, each tp rank sending its slice of the tokens."""
    configuration = job.configuration
    if configuration.pp == 1:
        return 0.0
    size = job.tokens_per_micro_batch * job.facts.hidden_size * rates.element_bytes / configuration.tp
    return neighbour_seconds(job.cluster, size, configuration.world_size // configuration.pp)


# The compute of one micro-batch, cut into the stages of a pipeline.


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """`layers` average blocks on one rank, and the head where the stage ends in it."""

    layers: int
    block: Passes
    head: Passes = NOTHING

    @property
    def forward(self) -> float:
        """Seconds of its forward passes."""
        return self.layers * self.block.forward + self.head.forward

    @property
    def backward(self) -> float:
        """Seconds of its backward passes with what is recomputed for them."""
        return self.layers * (self.block.backward + self.block.recomputed) + self.head.backward

    @property
    def total(self) -> float:
        """Seconds of both."""
        return self.forward + self.backward

    @property
    def weights(self) -> float:
        """The part of the backward that makes gradients of weights."""
        return self.layers * self.block.weights + self.head.weights


def stages(job: Job, rates: DeviceRates) -> tuple[Stage, ...]:
    """One stage per pipeline rank: layers as the plan names them, else as even as they go."""
    return _stages(job, rates, None if job.counts.trains_all else recipe_of(job))


@memo_by_fields(
    *("tp", "pp", "cp", "ep", "virtual_stages", "stage_layers", "sequence_parallel"),
    *("micro_batch_size", "sequence_length"),
    *("attention", "activation_checkpointing", "checkpoint_every", "recompute_modules", "fetches_by_module"),
)
def _stages(job: Job, rates: DeviceRates, frozen: Recipe | None) -> tuple[Stage, ...]:
    shape = geometry(job)
    blocks = NOTHING
    for stack in job_stacks(job):
        blocks = blocks + block_passes(stack, job, shape, rates, frozen) * stack.layers
    layers, pp = executed_layers(job), job.configuration.pp
    block, head = blocks * (1 / layers), head_passes(job, shape, rates)
    if pp == 1:
        return (Stage(layers=layers, block=block, head=head),)
    pieces, named = job.configuration.virtual_stages, job.configuration.stage_layers
    counts = blocks_per_stage(layers, pp=pp, virtual_stages=pieces, named=named)
    return (
        *(Stage(layers=count, block=block) for count in counts[:-1]),
        Stage(layers=counts[-1], block=block, head=head),
    )


# Schedules.


def bubble_seconds(job: Job, pipeline: Sequence[Stage], inside: Sequence[Exchanges], hop: float) -> float:
    """Return what the schedule takes beyond the work of its busiest stage.

    `inside` is what the ranks of each stage exchange inside a micro-batch.

    GPipe fills and drains as 1F1B does. With `v` virtual stages a rank waits for pieces of a v-th, and results cross
    to a neighbour v times as often (arXiv 2104.04473, section 2.2). ZB-H1 has the gradients of weights fill the wait
    of the drain: a stage's share of the bubble is its forward, and its backward less twice those (arXiv 2401.10241,
    table 1: T_F + T_B - T_W, where 1F1B's is T_F + T_B + T_W).
    """
    chosen = job.configuration
    if len(pipeline) == 1:
        return 0.0
    steps, pieces = chosen.gradient_accumulation_steps, chosen.virtual_stages
    forwards = [stage.forward + exchanged.forward for stage, exchanged in zip(pipeline, inside, strict=True)]
    backwards = [stage.backward + exchanged.backward for stage, exchanged in zip(pipeline, inside, strict=True)]
    work = steps * max(forward + backward for forward, backward in zip(forwards, backwards, strict=True))
    waits = one_forward_one_backward(forwards, backwards, steps, pieces * hop) - work
    if chosen.pp_schedule == "zero-bubble":
        busiest, exchanged = max(zip(pipeline, inside, strict=True), key=lambda pair: pair[0].total)
        waits *= 1 - 2 * busiest.weights / (busiest.total + exchanged.visible)
    return waits / pieces


SETTLED, AT_LEAST = 3, 24
"""Micro-batches per stage, and of any pipeline, after which each further one takes as long as the last."""


def one_forward_one_backward(
    forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float = 0.0
) -> float:
    """Seconds from the first forward to the last backward under 1F1B (arXiv 2104.04473, section 2.2).

    Stage s of p starts with p - s forwards, then takes a backward and a forward in turn, and ends with the backwards
    that are left. A stage waits for its neighbour's result and `hop` seconds for its way. Once the schedule has
    settled the rest is the schedule's period times their number.
    """
    last = forwards[-1] + backwards[-1]
    if len(set(forwards[:-1])) == len(set(backwards[:-1])) == 1 and forwards[0] + backwards[0] + 2 * hop <= last:
        # Equal stages before a last one that never waits: the rest is the way there and back.
        return sum(forwards[:-1]) + sum(backwards[:-1]) + 2 * (len(forwards) - 1) * hop + micro_batches * last
    if len(forwards) > LONGEST_SIMULATED:
        return _critical_path(forwards, backwards, micro_batches, hop)
    simulated = min(micro_batches, max(AT_LEAST, SETTLED * len(forwards)))
    seconds = _simulate(forwards, backwards, simulated, hop)
    if simulated < micro_batches:
        seconds += (micro_batches - simulated) * _period(forwards, backwards, hop)
    return seconds


LONGEST_SIMULATED = 8
"""Stages up to which a pipeline of unequal ones is simulated: it takes time with the square of their number."""


def _critical_path(forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float) -> float:
    """Return the longest of the paths through the schedule that wait at one stage only.

    They are of the first micro-batch there and back and of the others at that stage, or of all at it once the first one
    has come.

    A stage runs as many forwards as there are stages from it to the end while the first micro-batch is on its way. At
    most 5 % below what a simulation says, in 6000 random schedules of stages that differ by a block and a head.
    """
    stages = len(forwards)
    first_path = sum(forwards) + sum(backwards) + 2 * (stages - 1) * hop
    longest = before = 0.0
    for stage, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
        behind = max(micro_batches - (stages - stage), 0)
        longest = max(longest, first_path + (micro_batches - 1) * backward + behind * forward)
        longest = max(longest, before + 2 * stage * hop + micro_batches * (forward + backward))
        before += forward + backward
    return longest


def _simulate(forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float) -> float:
    """Wave i holds forward i of every stage, and the backward that goes before it there.

    Backward i - (p - s) of stage s needs the next stage's, which the wave before held; so two rows of times do for the
    whole schedule.
    """
    stages = len(forwards)
    free = [0.0] * stages
    # Behind the last stage there is none, whose gradient is always there.
    arrived = [-hop] * (stages + 1)
    for wave in range(micro_batches + stages):
        # Stage s takes its backward number wave - stages + s, as far as there is one.
        for stage in range(max(0, stages - wave), min(stages, micro_batches + stages - wave)):
            ready, returned = free[stage], arrived[stage + 1] + hop
            free[stage] = arrived[stage] = (ready if ready > returned else returned) + backwards[stage]
        if wave < micro_batches:
            sent = 0.0
            for stage, forward in enumerate(forwards):
                ready = free[stage]
                free[stage] = ended = (ready if ready > sent else sent) + forward
                sent = ended + hop
    return max(free)


def _period(forwards: Sequence[float], backwards: Sequence[float], hop: float) -> float:
    """Seconds per micro-batch once the pipeline runs evenly: the slowest round trip over neighbouring stages.

    A trip over n stages and back holds n micro-batches at a time, and crosses 2 (n - 1) times to a neighbour.
    """
    both = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    slowest = max(both)
    if not hop:
        return slowest
    for first in range(len(both)):
        trip = 0.0
        for count, stage in enumerate(both[first:], start=1):
            trip += stage
            slowest = max(slowest, (trip + 2 * hop * (count - 1)) / count)
    return slowest
