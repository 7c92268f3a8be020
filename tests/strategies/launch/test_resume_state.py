"""The state of a run when its ranks start: failed plans of all nodes, one global batch, the plan to resume with."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from transformers import LlamaConfig, LlamaForCausalLM

from hardware_db.files import HOME
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import NothingFits
from planner.models.resolve import resolve_model
from planner.search.request import Degrees, Request, WorkOptions, make_request
from planner.search.search import recommend
from planner.search.space import enumerate_candidates
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict, save_plan
from strategies.autoplan import fallback, live
from strategies.autoplan.select import PlanningOptions
from strategies.config.read import read_config
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun
from strategies.run_directory import state_consensus
from strategies.run_directory.attempt_options import FailedPlan
from strategies.run_directory.resume_state import Findings, ResumeState, Tried, Tuning, combined, largest_divisor
from strategies.variables import REQUEST
from tests.strategies import parallel_bodies
from tests.strategies.attempts import attempt_options


def _request(ranks: int, batch: int = 24) -> Request:
    cluster = resolve_cluster(HardwareRequest(gpus=ranks, gpu="A100-SXM4-80GB"))
    options = WorkOptions(seq_len=512, global_batch=batch, precision="bf16")
    return make_request(resolve_model("openai-community/gpt2"), cluster, options)


@cache
def _plans(ranks: int) -> tuple[Plan, ...]:
    return recommend(_request(ranks)).plans


def _failed(plan: Plan) -> FailedPlan:
    return FailedPlan(configuration=plan_to_dict(plan)["plan"], predicted_bytes=plan.memory.peak_allocated_bytes)


def _findings(plan: Plan | None = None, written: float = 1.0, **options: Any) -> Findings:
    given = asdict(attempt_options(checkpoint_directory="c", **{"attempt": 1, **options}))
    return Findings(options=given, is_resumed=True, last=plan and plan_to_dict(plan), written=written)


def test_a_first_attempt_has_nothing_to_keep(tmp_path: Path) -> None:
    attempt_options(checkpoint_directory="c", tunes=True, most_ranks=6).save(tmp_path)
    assert combined([Findings.of(tmp_path)], 3) == ResumeState(ranks=3, tunes=True, most_ranks=6)


def test_a_later_attempt_resumes_with_the_plan_that_ran_last() -> None:
    plan, other = _plans(4)[:2]
    state = combined([_findings(other, written=1.0), _findings(plan, written=2.0, global_batch_size=24)], 4)
    assert (state.plan, state.is_given) == (plan, False)
    assert (state.is_resumed, state.attempt, state.global_batch_size) == (True, 1, 24)
    assert ResumeState.from_text(state.to_text()) == state


def test_what_failed_on_any_node_is_not_gone_on_with() -> None:
    large, small = sorted(_plans(4), key=lambda plan: plan.memory.peak_allocated_bytes)[::-1][:2]
    here = _findings(large, failed_plans=(_failed(large),))
    state = combined([_findings(large), here], 4)
    assert state.plan is None
    assert state.failed_plans == (_failed(large),)
    assert combined([_findings(small), here], 4).plan == small
    larger = replace(large, memory=replace(large.memory, peak_allocated_bytes=large.memory.peak_allocated_bytes + 1))
    assert state.has_failed(larger)


def test_a_plan_that_offloads_and_failed_rules_out_itself_alone() -> None:
    large, small = sorted(_plans(4), key=lambda plan: plan.memory.peak_allocated_bytes)[::-1][:2]
    offloads = replace(small, configuration=replace(small.configuration, offload="optimizer"))
    state = combined([_findings(offloads, failed_plans=(_failed(offloads),))], 4)
    assert state.has_failed(offloads)
    assert not state.has_failed(large)
    assert combined([_findings(small, failed_plans=(_failed(small),))], 4).has_failed(large)


@pytest.mark.parametrize(("vendor", "is_out"), [("nvidia", True), ("cpu", False)])
def test_fewer_ranks_have_more_memory_each_on_a_host_alone(vendor: str, is_out: bool) -> None:
    failed, fewer = _plans(4)[0], _plans(2)[0]
    memory = replace(fewer.memory, peak_allocated_bytes=failed.memory.peak_allocated_bytes + 1)
    fewer = replace(fewer, memory=memory, cluster={**fewer.cluster, "vendor": vendor})
    state = ResumeState(ranks=2, failed_plans=(_failed(failed),))
    assert state.has_failed(fewer) is is_out


def test_a_plan_for_another_number_of_ranks_is_left_and_its_batch_kept() -> None:
    state = combined([_findings(_plans(4)[0])], 2)
    assert (state.plan, state.ranks, state.global_batch_size) == (None, 2, 24)


def test_a_given_plan_comes_before_the_last_one_unless_it_failed_and_tuned_ones_before_it() -> None:
    given, last = _plans(4)[:2]
    assert combined([_findings(last)], 4, given).is_given
    failed = combined([_findings(last, failed_plans=(_failed(given),))], 4, given)
    assert not failed.is_given
    tuned = replace(_findings(last), tuned=(plan_to_dict(last),))
    assert combined([tuned], 4, given).plan == last


def test_a_plan_of_other_degrees_than_are_asked_for_now_is_left_where_these_divide_the_ranks() -> None:
    plan = _plans(4)[0]
    assert combined([_findings(plan)], 4, degrees={"tp": 1}).plan == plan
    assert combined([_findings(plan)], 4, degrees={"tp": 2}).plan is None
    assert combined([_findings(plan)], 4, degrees={"tp": 3}).plan == plan


def test_ranks_that_share_samples_need_no_batch_of_their_own() -> None:
    """Twenty-four samples over 32 ranks: 24 of these train alone, all of them in twos or under a plan of theirs."""
    findings = [_findings(_plans(4)[0])]
    assert combined(findings, 32).ranks == 24
    assert combined(findings, 32, degrees={"tp": 2, "pp": 2}).ranks == 32
    assert combined(findings, 32, degrees={"tp": 2}).ranks == 24  # sixteen readers
    last, degrees = _plans(4)[0], {"strategy": "ddp", "dp_replicate": 4, "dp_shard": 1, "tp": 8}
    chosen = replace(last.configuration, **degrees, micro_batch_size=1, gradient_accumulation_steps=6)
    split = replace(last, configuration=chosen, cluster={**last.cluster, "gpus": 32, "gpus_per_node": 32})
    assert combined([_findings(split)], 32).ranks == 32


def test_a_plan_of_another_strategy_than_is_asked_for_now_is_left() -> None:
    plan = _plans(4)[0]
    assert combined([_findings(plan)], 4, strategy=plan.configuration.strategy).plan == plan
    other = combined([_findings(plan)], 4, strategy="fsdp-grad-op")
    assert plan.configuration.strategy != "fsdp-grad-op"
    assert (other.plan, other.global_batch_size) == (None, 24)


@pytest.mark.parametrize(("batch", "ranks", "expected"), [(8, 3, 2), (8, 4, 4), (24, 3, 3), (7, 4, 1)])
def test_as_many_ranks_train_as_the_batch_can_be_split_over(batch: int, ranks: int, expected: int) -> None:
    assert largest_divisor(batch, ranks) == expected
    assert combined([_findings(global_batch_size=batch)], ranks).ranks == expected


def test_metrics_of_ranks_that_trained_say_that_the_run_continues(tmp_path: Path) -> None:
    attempt_options(checkpoint_directory="c").save(tmp_path)
    (tmp_path / "metrics-rank1.jsonl").touch()
    assert not Findings.of(tmp_path).is_resumed
    (tmp_path / "metrics-rank1.jsonl").write_text("{}\n")
    save_plan(_plans(4)[0], tmp_path / "plan.yaml")
    findings = Findings.of(tmp_path)
    assert findings.is_resumed
    assert findings.last == plan_to_dict(_plans(4)[0])
    assert Findings.from_text(findings.to_text()).to_text() == findings.to_text()


def test_tuning_says_what_to_follow_and_after_it_what_was_fastest(tmp_path: Path) -> None:
    first, second, third = (plan_to_dict(plan) for plan in _plans(4)[:3])
    tried = (Tried(plan=first, step_seconds=3.0), Tried(plan=second, step_seconds=2.0))
    Tuning(tried=tried, following=third, switches=2).save(tmp_path)
    assert Tuning.load(tmp_path) == Tuning(tried=tried, following=third, switches=2)
    attempt_options(checkpoint_directory="c", attempt=2).save(tmp_path)
    assert Findings.of(tmp_path).tuned == (third, second, first)


def test_the_ranks_of_all_nodes_come_to_one_standing(tmp_path: Path) -> None:
    store = HashStore()
    plan = _plans(4)[0]
    nodes = [tmp_path / "a", tmp_path / "b"]
    for number, node in enumerate(nodes):
        node.mkdir()
        failed = (_failed(plan),) if number else ()
        attempt_options(checkpoint_directory="c", attempt=2, failed_plans=failed, global_batch_size=24).save(node)
    states: dict[int, ResumeState] = {}

    def rank(number: int) -> None:
        own = state_consensus.Place(rank=number, local_rank=number % 2, ranks=4)
        states[number] = state_consensus.consensus(store, own, nodes[number // 2])

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(20)
    assert len(states) == 4
    assert set(map(ResumeState.to_text, states.values())) == {states[0].to_text()}
    assert states[3].failed_plans == (_failed(plan),)


def test_a_rank_that_does_not_train_waits_until_the_script_of_rank_0_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    store = HashStore()
    waiting = threading.Thread(
        target=state_consensus.wait_for_training_ranks, args=(store, ResumeState(ranks=2, global_batch_size=8))
    )
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    state_consensus.release_waiting_ranks(store)
    waiting.join(100)
    assert not waiting.is_alive()


def test_the_ranks_that_train_count_themselves_alone() -> None:
    variables = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    state_consensus.narrow(ResumeState(ranks=3), variables)
    assert variables == {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}


def _best(monkeypatch: pytest.MonkeyPatch, request: Request, *failed: Plan) -> Plan:
    state = ResumeState(ranks=4, is_resumed=True, failed_plans=tuple(map(_failed, failed)))
    monkeypatch.setattr(fallback, "current", lambda: state)
    return fallback.best_plan(request)


def test_every_next_plan_is_smaller_by_a_growing_share(monkeypatch: pytest.MonkeyPatch) -> None:
    request, failed = _request(2), list[Plan]()
    for _ in range(4):
        failed.append(_best(monkeypatch, request, *failed))
    peaks = [plan.memory.peak_allocated_bytes for plan in failed]
    assert peaks[1] <= 0.95 * peaks[0]
    assert peaks[2] <= 0.9 * peaks[1]
    assert peaks[3] <= 0.8 * peaks[2]


@pytest.mark.slow
def test_a_chain_of_failures_ends_with_the_smallest_plan_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    request, failed = _request(2), list[Plan]()
    refusal = ""
    while not refusal and len(failed) < 100:
        try:
            failed.append(_best(monkeypatch, request, *failed))
        except NothingFits as nothing:
            refusal = str(nothing)
    assert "ran out of memory in this run" in refusal
    assert 4 < len(failed) < 15
    assert len({plan.configuration for plan in failed}) == len(failed)


STEPPING = "import dsplan\nengine, *_ = dsplan.initialize(model)\nengine.train_batch(batch)\n"
CALLING = "import dsplan\nengine, *_ = dsplan.initialize(model)\nengine.backward(engine(batch))\nengine.step()\n"


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        (STEPPING, True),
        (CALLING, False),
        ("from dsplan import DistributedTrainer as T\n", False),
        ("dsplan.DistributedTrainer(engine).train(3, loader)", True),
        ("dsplan.DistributedTrainer(engine, loss=mine).train(3, loader)", False),
        ("not Python :", False),
    ],
)
def test_a_script_that_hands_whole_steps_over_is_known_by_its_source(source: str, steps: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert live.steps_by_train_batch(script) is steps


class _Run:
    """A run whose ranks plan for a small llama, on CPUs or on A100s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, script: str = CALLING, gpu: str = "cpu") -> None:
        self._patch, self._gpu = monkeypatch, gpu
        (folder / "train.py").write_text(script)
        monkeypatch.setattr("sys.argv", [str(folder / "train.py")])
        monkeypatch.delenv(REQUEST, raising=False)
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32))
        self._batch = {"input_ids": torch.zeros(16, dtype=torch.long), "labels": torch.zeros(16, dtype=torch.long)}

    def request(self, state: ResumeState, strategy: Any = "fsdp", per_node: int = 4, **degrees: int) -> Request:
        cluster = resolve_cluster(HardwareRequest(gpus=state.ranks, gpu=self._gpu))
        self._patch.setattr(live, "probed_cluster", lambda machine, ranks: cluster)
        for module in (live, fallback):
            self._patch.setattr(module, "current", lambda: state)
        options = PlanningOptions(
            strategy=strategy,
            parallel=Degrees(**degrees) if degrees else None,
            config=read_config({"train_batch_size": 8}),
            training_data=[self._batch],
        )
        sizes = {"rank": 0, "local_rank": 0, "world_size": state.ranks, "local_world_size": min(per_node, state.ranks)}
        return live.live_request(self.model, options, Environment(**sizes, device=torch.device("cpu")), ())


def _splits_in(request: Request) -> set[tuple[int, int]]:
    return {(layout.tp, layout.pp) for layout in enumerate_candidates(request)}


def test_fewer_ranks_than_the_degrees_divide_choose_among_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HOME, str(tmp_path / "home"))  # by the datasheet alone, whatever the rates of this machine are
    run, left = _Run(monkeypatch, tmp_path), ResumeState(ranks=2, is_resumed=True, global_batch_size=8)
    request = run.request(left, tp=2, pp=2)
    assert _splits_in(request) == {(1, 1), (2, 1), (1, 2)}
    assert {layout.strategy for layout in enumerate_candidates(request)} == {"fsdp"}
    assert _splits_in(run.request(replace(left, ranks=3, global_batch_size=9), tp=2, pp=2)) == {(1, 1), (1, 3)}
    assert _splits_in(run.request(replace(left, ranks=4), tp=2, pp=2)) == {(2, 2)}
    # Of ranks on CPUs of several nodes it is not known which are beside each other.
    assert _splits_in(run.request(left, per_node=1, tp=2, pp=2)) == {(1, 1), (1, 2)}
    whole = fallback.best_plan(request)
    assert not whole.configuration.splits_model
    assert whole.configuration.global_batch_size == 8


def test_a_run_whose_nodes_have_not_all_come_begins_with_other_degrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _Run(monkeypatch, tmp_path)
    assert _splits_in(run.request(ResumeState(ranks=2, most_ranks=4), tp=2, pp=2)) == {(1, 1), (2, 1), (1, 2)}
    notice = "parallel: tp 2 x pp 2 x cp 1 = 4 does not divide the 2 ranks of this job: others are chosen"
    assert notice in capsys.readouterr().out
    assert _splits_in(run.request(ResumeState(ranks=4, most_ranks=4), tp=2, pp=2)) == {(2, 2)}
    assert "others are chosen" not in capsys.readouterr().out
    with pytest.raises(CannotRun, match="does not divide the 2 ranks of this job; change a degree"):
        run.request(ResumeState(ranks=2, most_ranks=2), tp=2, pp=2)


@pytest.mark.slow
def test_a_pipeline_of_ones_own_module_is_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = _Run(monkeypatch, tmp_path)
    run.model = parallel_bodies.build("gpt")
    plan = fallback.best_plan(run.request(ResumeState(ranks=4), strategy="ddp", tp=2, pp=2))
    assert (plan.configuration.tp, plan.configuration.pp) == (2, 2)


def test_ranks_on_cpus_split_a_model_only_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, fresh = _Run(monkeypatch, tmp_path, STEPPING), ResumeState(ranks=2)
    request = run.request(fresh, strategy="ddp")
    assert _splits_in(request) == {(1, 1)}
    failed, resumed = list[Plan](), replace(fresh, is_resumed=True, global_batch_size=8)
    while not failed or not failed[-1].configuration.splits_model:
        state = replace(resumed, failed_plans=tuple(map(_failed, failed))) if failed else fresh
        failed.append(fallback.best_plan(run.request(state, strategy="ddp")))
        assert len(failed) < 10
    assert len(failed) > 1
    assert failed[-1].memory.peak_allocated_bytes < 0.95 * failed[-2].memory.peak_allocated_bytes
    assert {plan.configuration.strategy for plan in failed} == {"ddp"}
    assert {plan.configuration.global_batch_size for plan in failed} == {8}


@pytest.mark.parametrize("script", [CALLING, STEPPING])
def test_a_pipeline_is_chosen_for_scripts_that_can_feed_it(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    splits = _splits_in(_Run(monkeypatch, tmp_path, script, gpu="A100-SXM4-80GB").request(ResumeState(ranks=4)))
    assert {(1, 1), (2, 1), (4, 1)} <= splits
    assert any(pp > 1 for _, pp in splits) is (script is STEPPING)
