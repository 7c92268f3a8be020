"""The search without any cleverness: every micro-batch of every shape is priced, and the best of each group kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.cost.timing import step_time
from planner.search.estimate import price
from planner.search.ranking import Timed, group_name, order
from planner.search.request import Request
from planner.search.space import configuration_of, enumerate_candidates, micro_batches


def everything_that_fits(request: Request) -> Iterator[Timed]:
    """Every configuration of a request that fits with every margin, on its devices."""
    for layout in enumerate_candidates(request):
        for micro in micro_batches(request, layout):
            priced = price(request, configuration_of(request, layout, micro))
            if priced.judgement.keeps_margins:
                yield Timed(priced=priced, time=step_time(priced.job))


def best_by_group(requests: Iterable[Request]) -> dict[str, Timed]:
    """The best of every group over requests that differ only in how many devices there are."""
    bests: dict[str, Timed] = {}
    for request in requests:
        for item in everything_that_fits(request):
            name = group_name(item.configuration)
            if name not in bests or order(item, request.objective) < order(bests[name], request.objective):
                bests[name] = item
    return bests
