"""Rounds of post-training as people ask for them: where to generate, and what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsplan.checking import check_files
from dsplan.question import Question
from dsplan.render.plan_view import rollout_text
from dsplan.report.question import rounds
from planner.search.rollouts import NEAR, recommend_ways
from planner.search.search import first_plan
from tests.dsplan.cli import Cli

ASKED = (
    "--model qwen2.5-0.5b --gpu A100-SXM4-80GB --gpus 2 --task grpo --prompt-len 128 --completion-len 256:512"
    " --generations 4 --prompts-per-step 16"
)


def question(**more: object) -> Question:
    """Return the question of `ASKED`."""
    return Question(
        model="qwen2.5-0.5b",
        gpu="A100-SXM4-80GB",
        gpus=2,
        task="grpo",
        prompt_len=128,
        completion_len="256:512",
        generations=4,
        prompts_per_step=16,
        **more,  # type: ignore[arg-type]
    )


def test_every_place_to_generate_is_tried_and_the_first_is_near_the_fastest() -> None:
    requests = question().requests(strategies=("ddp", "fsdp"))
    tried = {request.workload.post.rollout for request in requests if request.workload.post}
    assert tried == {"colocate", "server", "hf"}
    fastest = min(plan.time.step_seconds for plan in map(first_plan, requests) if plan is not None)
    answer = recommend_ways(requests)
    assert answer.plans[0].time.step_seconds <= (1 + NEAR) * fastest
    assert answer.plans[0].workload["rollout"] == "colocate"
    assert "generation beside training" in answer.choice
    assert "by the model itself" in answer.choice


def test_decided_generation_is_one_request() -> None:
    assert len(question(rollout="hf").requests()) == 1
    (server,) = question(rollout_gpus=1, rollout_tp=1).requests()
    assert server.cluster.gpus == 1
    assert {
        request.workload.post.rollout_sleep
        for request in question(rollout="colocate").requests()
        if request.workload.post
    } == {True, False}


def test_a_step_is_of_as_many_samples_wherever_completions_are_made() -> None:
    """Places are compared by the seconds of a step, and where fewer GPUs train, a usual batch would be smaller."""
    requests = Question(model="llama-3.1-8b", gpus=8, gpu="H100-SXM5-80GB", task="ppo").requests()
    assert {request.cluster.gpus for request in requests} > {8, 4}
    assert {request.workload.global_batch_size for request in requests} == {64}
    assert {request.defaults.count("global batch 64 (--global-batch)") for request in requests} == {1}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--rollout-tp 4",
            "--rollout-tp 4 does not divide the 14 attention heads, which an engine shares evenly; use 1 or 2",
        ),
        ("--rollout hf --rollout-gpus 2", "--rollout-gpus 2 is for --rollout server, not hf; drop one of the two"),
        ("--generations 1", "--generations 1 leaves --task grpo nothing to compare a completion with; give 2 or more"),
    ],
)
@pytest.mark.parametrize("command", ["recommend", "estimate"])
def test_rounds_that_no_trainer_can_run_are_refused(cli: Cli, command: str, flags: str, problem: str) -> None:
    shown = cli(f"{command} {ASKED} {flags}")
    assert (shown.status, shown.err) == (2, f"dsplan: {problem}\n")


def test_ppo_and_other_trainers_methods_may_have_one_completion_a_prompt(tmp_path: Path) -> None:
    (ppo,) = Question(model="qwen2.5-0.5b", gpu="L4-24GB", gpus=1, task="ppo", generations=1, rollout="hf").requests()
    assert ppo.workload.post is not None
    assert ppo.workload.post.generations == 1
    script = tmp_path / "train.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=reinforce_plus_plus data.train_batch_size=128"
        " actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.actor.ppo_mini_batch_size=128"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=1"
        " trainer.n_gpus_per_node=8"
    )
    checked = check_files([script], hardware={"gpu": "H100-SXM5-80GB"})
    assert checked.audit.plan is not None
    assert checked.audit.plan.workload["generations"] == 1


def test_the_command_line_shows_the_round(cli: Cli) -> None:
    shown = cli(f"estimate {ASKED} --strategy ddp --micro-batch 8 --rollout colocate --rollout-sleep --beta 0.04")
    assert shown.status == 0
    for words in (
        "a round of 16 prompts x 4 completions takes",
        "colocate 30%, sleeps",
        "generate",
        "reference",
        "sync",
    ):
        assert words in shown.out
    plan = cli(
        f"estimate {ASKED} --strategy ddp --micro-batch 8 --steps-per-generation 2 --grad-accum 2 --json".replace(
            "--prompts-per-step 16", ""
        )
    ).json
    assert plan["workload"]["prompts_per_step"] == 8
    assert set(plan["time"]["phases"]) == {"generate", "update"}
    assert {"generate", "update"} <= set(plan["memory"]["phases"])


def test_a_round_is_written_and_explained_and_its_largest_micro_batch_found(cli: Cli, tmp_path: Path) -> None:
    flags = f"{ASKED} --rollout colocate --rollout-tp 1 --rollout-sleep --rollout-memory 0.3"
    written = cli(f"recommend {flags} --top 1 --out", tmp_path)
    assert written.status == 0
    assert "in tiles of tokens and words" in (tmp_path / "plan-1" / "accelerate" / "accelerate.yaml").read_text()
    assert "a round of 16 prompts x 4 completions" in cli("explain", tmp_path / "plan-1.yaml").out
    largest = cli("max --model qwen2.5-0.5b --gpu A100-SXM4-80GB --gpus 1 --task grpo --strategy single --json").json
    assert all(row["micro_batch_size"] for row in largest["maxima"])


@pytest.mark.parametrize(("rollout", "words"), [("hf", "hf"), ("server", "1 GPU")])
def test_reports_draw_the_round(rollout: str, words: str) -> None:
    about = question(rollout=rollout, **({"rollout_gpus": 1, "rollout_tp": 1} if rollout == "server" else {}))
    (request,) = about.requests()
    plan = first_plan(request)
    assert plan is not None
    assert rollout_text(plan.workload) == words
    (picture,) = rounds(plan)
    assert words in picture.caption
    (plain,) = Question(model="opt-125m", gpu="A100-SXM4-80GB", gpus=1).requests()
    other = first_plan(plain)
    assert other is not None
    assert rounds(other) == ()


def test_a_file_without_gpus_has_those_of_an_engine(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
        " data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.rollout.n=4"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    )
    outcome = check_files([script], hardware={"gpu": "H100-SXM5-80GB"}).audit
    assert outcome.plan is not None
    assert outcome.plan.configuration.world_size == 2
    assert "does not divide the 1 GPU of" in str(
        check_files([script], hardware={"gpu": "H100-SXM5-80GB", "gpus": 1}).audit.why
    )
