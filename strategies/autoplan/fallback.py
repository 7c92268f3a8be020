"""The best plan for a run as it stands: within what is asked, and without what ran out of memory in it before."""

from __future__ import annotations

from dataclasses import replace

from planner.calibration.oom_history import OomRecord
from planner.errors import NothingFits
from planner.search.recall import oom_record_of
from planner.search.request import Request
from planner.search.search import recommend
from planner.types.plan import Plan
from strategies.run_directory.attempt_options import FailedPlan
from strategies.run_directory.resume_state import configuration_of
from strategies.run_directory.state_consensus import current

SAVES_AT_LEAST = 0.05
"""Share of the memory by which the plan after the first that failed is smaller, and twice as much after every other:
an attempt is too dear to try the same again in a handful of bytes less. So about six end at the smallest plan."""
SAVES_AT_MOST = 0.5


def best_plan(request: Request) -> Plan:
    """Return the first plan of the search; after failures in this run, one that is predicted to save a good share.

    Of their memory, that is; where no such plan is left, it is the smallest of all that are predicted to save any.

    Raises:
        NothingFits: there is none; the message holds the closest miss and the remedies.
        ContradictoryRequest: the batch cannot be split as asked.
    """
    failed = current().failed_plans
    share = min(SAVES_AT_LEAST * 2 ** (len(failed) - 1), SAVES_AT_MOST) if failed else 0.0
    answer = recommend(exclude_failed(request, failed, share))
    if failed and not answer.plans:
        answer = recommend(replace(exclude_failed(request, failed), objective="memory"))
    if answer.plans:
        return answer.plans[0]
    raise NothingFits(answer.no_plan().sentence)


def exclude_failed(request: Request, failed: tuple[FailedPlan, ...], share: float = 0.0) -> Request:
    """Leave out the plans that failed, and those that are predicted to save less than a `share` of their memory."""
    oom_records = tuple(filter(None, (_oom_record(plan, request, share) for plan in failed)))
    experience = request.experience
    return replace(request, experience=replace(experience, oom_records=(*oom_records, *experience.oom_records)))


def _oom_record(failed: FailedPlan, request: Request, share: float) -> OomRecord | None:
    configuration = configuration_of(failed)
    if configuration is None:
        return None
    record = oom_record_of(configuration, failed.predicted_bytes, request)
    return replace(record, peak_allocated_bytes=round(record.peak_allocated_bytes * (1 - share)))
