"""Generation in a recommendation: on GPUs that train as well or on others, by how many, with which share of memory.

Every way that makes sense is a request of its own, whose plans the search ranks as ever; the best plan of each way is
then compared with the others by the seconds of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from planner import vocabulary as words
from planner.cost.generation import ENGINE_BYTES, Engines, engines_of
from planner.errors import ContradictoryRequest
from planner.models.facts import ModelFacts
from planner.search.estimate import job_of
from planner.search.post_training import PostTrainingOptions, require_site
from planner.search.ranking import Rejection
from planner.search.request import Request
from planner.search.search import Recommendation, first_plan, recommend
from planner.search.space import configuration_of, enumerate_candidates, micro_batches
from planner.types.cluster import Cluster
from planner.types.plan import Plan

SHARES = (0.3, 0.5, 0.7, 0.85)
"""Of a GPU's memory for an engine beside training; TRL takes 0.3, verl 0.5 and NeMo-RL 0.6."""
SERVER_SHARE = 0.9
PARTS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Of the GPUs for generation alone, as many of them as divide nodes evenly."""

NEAR = 0.05
"""Two ways whose steps differ by less are not told apart: what they take beside time decides."""

Options = TypeVar("Options", bound=PostTrainingOptions)


def is_open(options: PostTrainingOptions, task: words.Task | None, cluster: Cluster) -> bool:
    """Return whether a question leaves open where its completions are generated; a CPU's model generates itself."""
    decided = options.rollout == "hf" or (options.rollout_gpus is not None and options.rollout_tp is not None)
    return task in words.GENERATING and not decided and not cluster.device.is_cpu


def ways(options: Options, cluster: Cluster, facts: ModelFacts) -> Iterator[Options]:
    """Yield the options with each way to generate that they leave open.

    An engine takes as few GPUs as have room for its weights, and as many again at most.

    Raises:
        ContradictoryRequest: the options say two sites.
    """
    require_site(options)
    wanted = options.rollout or ("server" if options.rollout_gpus else None)
    if wanted in (None, "colocate"):
        shares = SHARES if options.rollout_memory is None else (options.rollout_memory,)
        sleeps = (True, False) if options.rollout_sleep is None else (options.rollout_sleep,)
        for share in shares:
            for tp in _engine_sizes(options, cluster, facts, share, cluster.gpus):
                for sleep in sleeps:
                    yield replace(options, rollout="colocate", rollout_memory=share, rollout_tp=tp, rollout_sleep=sleep)
    if wanted in (None, "server"):
        share = options.rollout_memory or SERVER_SHARE
        for apart in _numbers_apart(options, cluster):
            for tp in _engine_sizes(options, cluster, facts, share, apart):
                yield replace(options, rollout="server", rollout_gpus=apart, rollout_tp=tp, rollout_memory=share)
    if wanted is None and options.rollout_tp is None:
        yield replace(options, rollout="hf")


def _engine_sizes(
    options: PostTrainingOptions, cluster: Cluster, facts: ModelFacts, share: float, gpus: int
) -> tuple[int, ...]:
    if options.rollout_tp is not None:
        return (options.rollout_tp,)
    room = share * cluster.capacity_bytes - ENGINE_BYTES
    sizes = [
        tp for tp in _powers_of_two(min(gpus, cluster.gpus_per_node)) if gpus % tp == 0 and facts.num_heads % tp == 0
    ]
    enough = [tp for tp in sizes if room > 0 and 2 * facts.parameters / tp < room]
    return tuple(enough[:2])


def _numbers_apart(options: PostTrainingOptions, cluster: Cluster) -> list[int]:
    if options.rollout_gpus is not None:
        return [options.rollout_gpus]
    unit = cluster.gpus_per_node if cluster.nodes > 1 else 1
    numbers = {round(part * cluster.gpus / unit) * unit for part in PARTS}
    return sorted(number for number in numbers if 0 < number < cluster.gpus)


def _powers_of_two(largest: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(largest.bit_length()) if 1 << power <= largest)


def without_idle_shares(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests without those whose engines have more memory than one that holds a whole round at once."""
    kept, holds_all = [], set()
    for request in requests:
        post = request.workload.post
        engines = None if post is None or post.rollout != "colocate" else _engines(request)
        if post is None or engines is None:
            kept.append(request)
            continue
        kind = (post.rollout_tp, post.rollout_sleep)
        if kind not in holds_all:
            kept.append(request)
        if engines.at_a_time >= engines.samples:
            holds_all.add(kind)
    return tuple(kept)


def _engines(request: Request) -> Engines | None:
    layout = next(iter(enumerate_candidates(request)), None)
    sizes = () if layout is None else micro_batches(request, layout)
    if layout is None or not sizes:
        return None
    return engines_of(job_of(request, configuration_of(request, layout, sizes[0])))


def recommend_ways(requests: Sequence[Request], *, with_front: bool = False) -> Recommendation:
    """Rank the best plans of requests that differ in where they generate, and say what the others take.

    Raises:
        ContradictoryRequest: there are no requests, or as `recommend` where none of them has a plan.
    """
    if not requests:
        raise ContradictoryRequest(
            "no engine of these GPUs has room for the model's weights; give --rollout-memory more, or --rollout hf"
        )
    if len(requests) == 1:
        return recommend(requests[0], with_front=with_front)
    firsts = [(plan, request) for request in requests if (plan := _first(request)) is not None]
    if not firsts:
        return recommend(requests[0], with_front=with_front)
    firsts.sort(key=lambda pair: pair[0].time.step_seconds)
    fastest = firsts[0][0].time.step_seconds
    near = [pair for pair in firsts if pair[0].time.step_seconds <= (1 + NEAR) * fastest]
    best_plan, best_request = min(near, key=lambda pair: _effort(*pair))
    answer = recommend(best_request, with_front=with_front)
    shown = _one_of_each(firsts, best_plan)
    plans = sorted((*answer.plans, *shown), key=lambda plan: plan.time.step_seconds)[: best_request.top]
    if answer.plans[0] not in plans[:1]:
        plans = [answer.plans[0], *(plan for plan in plans if plan is not answer.plans[0])][: best_request.top]
    first = best_plan.time.step_seconds
    others = "; ".join(f"{_describe_rollout(plan)} {plan.time.step_seconds / first - 1:+.0%}" for plan in shown)
    choice = f"{answer.choice}; generation {_describe_rollout(best_plan)}" + (f" ({others})" if others else "")
    rejected = (*answer.rejected, *_without_plan(requests, firsts))
    return replace(answer, plans=tuple(plans), choice=choice, rejected=rejected)


def _effort(plan: Plan, request: Request) -> tuple[object, ...]:
    """Return what a way takes beside time, least first: offload, a tight fit, memory of an engine and its size."""
    post = request.workload.post
    assert post is not None
    offloads = plan.configuration.offload != "none"
    return offloads, plan.verdict != "fits", post.rollout != "colocate", post.rollout_memory, post.rollout_tp


def _first(request: Request) -> Plan | None:
    try:
        return first_plan(request)
    except ContradictoryRequest:  # the batch cannot be split over the GPUs that are left
        return None


def _one_of_each(firsts: Sequence[tuple[Plan, Request]], best: Plan) -> list[Plan]:
    """Return the best plan of every other place to generate, `best`'s own site aside."""
    sites: dict[object, Plan] = {}
    for plan, _ in firsts:
        site = plan.workload["rollout"]
        if site != best.workload["rollout"]:
            sites.setdefault(site, plan)
    return list(sites.values())


def _without_plan(requests: Sequence[Request], firsts: Sequence[tuple[Plan, Request]]) -> Iterator[Rejection]:
    """Yield the sites of which no way fits."""
    fitting = {request.workload.post.rollout for _, request in firsts if request.workload.post is not None}
    missing = dict.fromkeys(request.workload.post.rollout for request in requests if request.workload.post is not None)
    for site in missing:
        if site not in fitting:
            yield Rejection(strategy=f"rollout {site}", reason="no plan fits beside it")


def _describe_rollout(plan: Plan) -> str:
    """Return where a plan generates, in a few words."""
    work = plan.workload
    site, tp = work["rollout"], f", tp {work['rollout_tp']}"
    if site == "server":
        return f"on {work['rollout_gpus']} GPUs of their own{tp}"
    if site == "hf":
        return "by the model itself"
    return f"beside training with {work['rollout_memory']:.0%} of a GPU{tp}{', asleep' * work['rollout_sleep']}"
