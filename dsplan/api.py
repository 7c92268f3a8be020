"""The planning half of the public Python names; keywords are the fields of `dsplan.question.Question`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dsplan.exact.ask import silent
from dsplan.question import Goal, Question, estimate_question
from planner.errors import NothingFits
from planner.search.exact import ExactOptions
from planner.search.rollouts import recommend_ways
from planner.search.search import Recommendation
from planner.types.plan import Plan


def recommend(**options: Any) -> Recommendation:
    """Ranked plans: `recommend(model="opt-6.7b", gpus=8).plans[0]`.

    Takes the fields of `Question` and of `dsplan.question.Goal`, such as `objective`, `top` and `price`.

    Raises:
        DsplanError: the model, the hardware or a number is not one that can be planned with.
    """
    named = {item.name for item in fields(Goal)}
    goal = Goal(**{name: value for name, value in options.items() if name in named})
    question = Question(**{name: value for name, value in options.items() if name not in named})
    return recommend_ways(question.requests(**goal.ranking()), with_front=goal.pareto)


def plan(**question: Any) -> Plan:
    """Return the best plan: `plan(model="opt-6.7b", gpus=8)`. Takes what `recommend` takes.

    Raises:
        NothingFits: no plan fits; the message holds the closest miss and the remedies.
        DsplanError: the model, the hardware or a number is not one that can be planned with.
    """
    answer = recommend(**question)
    if answer.plans:
        return answer.plans[0]
    raise NothingFits(answer.no_plan().sentence)


def estimate(*, exact: bool = False, **arguments: Any) -> Plan:
    """Memory and time of one configuration: `estimate(model="opt-6.7b", gpus=8, strategy="zero3", micro_batch=2)`.

    Takes the fields of `Question` and of `ExactOptions` (planner/search/exact.py). With `exact` the memory comes from
    a trace of the real module, which needs torch but neither weights nor a GPU, and is kept for the next time.

    Raises:
        DsplanError: the model, the hardware, a number or the configuration is not possible.
    """
    exactly = {item.name for item in fields(ExactOptions)}
    options = ExactOptions(**{name: value for name, value in arguments.items() if name in exactly})
    question = Question(
        **{
            name: value
            for name, value in arguments.items()
            if name not in exactly - {"global_batch", "prompts_per_step"}
        }
    )
    return estimate_question(question, options, silent if exact else None)[1]
