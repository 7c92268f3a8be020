"""From a question about one configuration to its plan, by closed forms or by a trace."""

from __future__ import annotations

from collections.abc import Callable

from dsplan.question import Question
from planner.exact import ExactOptions, exact
from planner.plan import Plan
from planner.request import Request


def estimated(
    question: Question, options: ExactOptions, report: Callable[[str], None] | None = None
) -> tuple[Request, Plan]:
    """The plan, and the request with what was taken for granted; with `report` the memory is traced, and told of it.

    Raises:
        DsplanError: the model, the hardware, a number or the configuration is not possible, or torch is missing.
    """
    if report is None:
        from planner.estimate import estimate

        request, configuration = exact(question.request(), options)
        return request, estimate(request, configuration)
    from planner.kept_traces.ask import Tracing
    from planner.kept_traces.cache import TraceCache
    from planner.kept_traces.estimate import traced_estimate
    from planner.kept_traces.source import model_source

    cache = TraceCache()
    source = model_source(question.model, question.model_size, cache)
    request, configuration = exact(question.request(facts=source.facts), options)
    return request, traced_estimate(request, configuration, source, Tracing(cache=cache, report=report))
