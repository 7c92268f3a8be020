"""Decisions that follow an ending: restarts with growing pauses within a budget, other plans, or the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.launch.failure_causes import Ending
from strategies.launch.policy import Decision, Policy, RunContext
from strategies.run_directory.spec import EndingKind

FURTHER = RunContext(highest_step=10, progressed=True, has_plan=True)
STUCK = RunContext(highest_step=10, has_plan=True)


def _ending(kind: EndingKind, step: int | None = 10, reason: str = "why") -> Ending:
    return Ending(kind=kind, rank=0, step=step, type="ValueError", reason=reason)


def test_pauses_double_and_the_budget_ends() -> None:
    policy = Policy(9)
    pauses = []
    while (decision := policy.decide(_ending("killed"), STUCK)).continues:
        pauses.append(decision.delay_seconds)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert decision.action == "give_up"
    assert "9 restarts brought no progress" in decision.why


def test_progress_fills_the_budget_and_resets_the_pause() -> None:
    policy = Policy(1)
    for _ in range(20):
        decision = policy.decide(_ending("killed"), FURTHER)
        assert (decision.action, decision.delay_seconds) == ("restart", 0)
    assert policy.decide(_ending("lost"), STUCK).action == "give_up"


def test_no_retries() -> None:
    assert Policy(0).decide(_ending("killed"), FURTHER).action == "give_up"


def test_what_cannot_be_resumed_is_not_begun_again_unless_asked() -> None:
    stuck = replace(STUCK, can_resume=False)
    assert Policy(None).decide(_ending("killed"), stuck).action == "give_up"
    assert Policy(None).decide(_ending("killed"), STUCK).action == "restart"
    assert Policy(2).decide(_ending("killed"), stuck).action == "restart"


@pytest.mark.parametrize("kind", ["failed", "not_finite"])
def test_what_comes_again_at_the_same_step_ends_the_run(kind: EndingKind) -> None:
    policy = Policy(5)
    assert policy.decide(_ending(kind), FURTHER).action == "restart"
    assert policy.decide(_ending(kind, step=11), FURTHER).action == "restart"
    assert policy.decide(_ending(kind, step=11), STUCK).action == "give_up"


@pytest.mark.parametrize("kind", ["killed", "hung", "lost", "disk_full"])
def test_what_comes_from_outside_may_come_again(kind: EndingKind) -> None:
    policy = Policy(5)
    assert [policy.decide(_ending(kind), STUCK).action for _ in range(3)] == ["restart"] * 3


def test_an_exception_before_the_first_step_ends_the_run() -> None:
    never = RunContext(highest_step=0)
    assert Policy(5).decide(_ending("failed"), never).action == "give_up"
    assert Policy(5).decide(_ending("killed"), never).action == "restart"


def test_a_refusal_ends_the_run() -> None:
    assert Policy(5).decide(_ending("refused"), FURTHER).action == "give_up"


def test_out_of_memory_takes_plan_after_plan_and_none_of_the_budget() -> None:
    policy = Policy(1)
    assert {policy.decide(_ending("out_of_memory"), STUCK).action for _ in range(10)} == {"next_plan"}
    assert policy.decide(_ending("killed"), STUCK).action == "restart"


def test_out_of_memory_without_a_plan_is_a_failure_like_others() -> None:
    policy = Policy(5)
    alone = RunContext(highest_step=3, progressed=True)
    assert policy.decide(_ending("out_of_memory"), alone).action == "restart"
    assert policy.decide(_ending("out_of_memory"), alone).action == "give_up"


@pytest.mark.parametrize(
    ("reason", "action"),
    [
        ("can't allocate memory: you tried to allocate 4611686018427387904 bytes. Error code 12", "give_up"),
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 10 GiB", "give_up"),
        ("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 10 GiB", "next_plan"),
        ("killed by the kernel", "next_plan"),
    ],
)
def test_a_tensor_larger_than_all_memory_is_no_matter_of_plans(reason: str, action: str) -> None:
    now = RunContext(highest_step=3, progressed=True, has_plan=True, memory_bytes=10 * 2**30)
    assert Policy(5).decide(_ending("out_of_memory", reason=reason), now).action == action


def test_stops_on_purpose() -> None:
    policy = Policy(0)
    assert policy.decide(_ending("switch"), STUCK).action == "switch"
    assert policy.decide(_ending("regrouped"), STUCK).action == "restart"
    assert policy.decide(_ending("preempted"), STUCK) == Decision(action="stop", why="the run ends here")
    stays = RunContext(highest_step=10, stays=True)
    assert policy.decide(_ending("preempted"), stays).action == "restart"
