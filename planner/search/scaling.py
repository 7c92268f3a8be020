"""Changes of an answer: the fastest plans on other numbers of devices, and plans at other micro-batches and lengths.

Each returns plans, also such as do not fit: their verdict says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from hardware_db.records import dataclass
from planner import limits
from planner.cluster.budget import NO_BUDGET
from planner.errors import ContradictoryRequest
from planner.search.device_counts import MOST_DEVICES, doubled, halved, on_devices
from planner.search.estimate import plan_of, price, time_step
from planner.search.maximum import SEQUENCE_STEP, longest_steps, of_length
from planner.search.request import Request
from planner.search.search import first_plan
from planner.types.cluster import Cluster
from planner.types.plan import Configuration, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The speed of all devices of a plan together."""

    plan: Plan
    per_second: float
    """Tokens, or samples where those are what counts."""
    of_linear: float
    """The share of what it would be if it grew as the devices do from the fewest of them."""


def rates(plans: Sequence[Plan]) -> tuple[Rate, ...]:
    """Plans on growing numbers of devices, the fewest first, with how fast each is."""
    each = [
        plan.throughput.samples_per_second / plan.configuration.world_size
        if plan.configuration.counts_samples
        else plan.throughput.tokens_per_second_per_gpu
        for plan in plans
    ]
    return tuple(
        Rate(plan=plan, per_second=rate * plan.configuration.world_size, of_linear=rate / each[0])
        for plan, rate in zip(plans, each, strict=True)
    )


FEWER, MORE = 2, 2
"""How often the devices are halved and doubled."""
SHORTEST, LONGEST = 512, 131_072
"""Tokens of a sequence between which lengths are tried, and that of the question itself."""


def over_devices(request: Request, here: Plan) -> tuple[Plan, ...]:
    """Return the fastest plans on a quarter of the devices to four times as many, where any fits.

    `here` is the one on those that were asked for. The global batch is as `on_devices` has it.
    """
    plans = [here]
    for cluster in _clusters(request.cluster):
        other = replace(on_devices(request, cluster), objective="throughput", budget=NO_BUDGET)
        with suppress(ContradictoryRequest):  # the batch cannot be split over so many
            plan = first_plan(other)
            plans += [] if plan is None else [plan]
    return tuple(sorted(plans, key=lambda plan: plan.configuration.world_size))


def _clusters(cluster: Cluster) -> Iterator[Cluster]:
    fewer: Cluster | None = cluster
    for _ in range(FEWER):
        fewer = None if fewer is None else halved(fewer)
        if fewer is not None:
            yield fewer
    more = cluster
    for _ in range(MORE):
        more = doubled(more)
        if more.gpus <= MOST_DEVICES:
            yield more


def over_micro_batches(request: Request, plan: Plan) -> tuple[Plan, ...]:
    """Return the plan at every micro-batch that is a power of two and leaves the global batch as it is.

    None of a plan whose ranks have unlike shares, which others would fit at another micro-batch.
    """
    chosen = plan.configuration
    if chosen.has_shares:
        return ()
    samples = chosen.micro_batch_size * chosen.gradient_accumulation_steps
    sizes = {2**power for power in range(samples.bit_length()) if samples % 2**power == 0} | {chosen.micro_batch_size}
    return _priced(
        request,
        [replace(chosen, micro_batch_size=size, gradient_accumulation_steps=samples // size) for size in sorted(sizes)],
    )


def over_lengths(request: Request, plan: Plan) -> tuple[Plan, ...]:
    """Return the plan at sequences of powers of two tokens, as many samples as before.

    None where no length is, and of a plan whose ranks have unlike shares.
    """
    most = min(longest_steps(request) * SEQUENCE_STEP, limits.TOKENS.most)
    length_here = plan.configuration.sequence_length
    if not most or length_here < 2 or plan.configuration.has_shares:
        return ()
    lengths = {
        SHORTEST << power for power in range(20) if SHORTEST << power <= min(most, max(LONGEST, length_here))
    } | {length_here}
    plans: list[Plan] = []
    for length in sorted(lengths):
        plans += _priced(of_length(request, length), [replace(plan.configuration, sequence_length=length)])
    return tuple(plans)


def _priced(request: Request, configurations: Sequence[Configuration]) -> tuple[Plan, ...]:
    every = [price(request, configuration) for configuration in configurations]
    return tuple(plan_of(priced, time_step(priced)) for priced in every)
