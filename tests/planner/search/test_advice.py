"""Advice above the plans: what it promises is what asking so gives."""

from __future__ import annotations

import shlex

import pytest

from dsplan.question import Goal, Question
from planner.search.advice import MOST_OFFERED, WORTH_SAYING
from planner.search.search import Recommendation, recommend

FIELDS = {
    "--global-batch": ("global_batch", int),
    "--prompts-per-step": ("prompts_per_step", int),
    "--gpus": ("gpus", int),
    "--optimizer": ("optimizer", str),
    "--precision": ("precision", str),
    "--loss": ("loss", str),
    "--code": ("code", str),
    "--attention": ("attention", str),
}


def answer(**flags: object) -> Recommendation:
    return recommend(Question(**flags).request(**Goal().ranking()))  # type: ignore[arg-type]


def asked_so(flags: dict[str, object], flag: str) -> dict[str, object]:
    words, changed = shlex.split(flag), dict(flags)
    while words:
        name = words.pop(0)
        if name == "--compile":
            changed["compile"] = True
            continue
        field, kind = FIELDS[name]
        changed[field] = kind(words.pop(0))
    return changed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"model": "bert-large", "gpus": 8, "gpu": "V100-SXM2-32GB", "seq_len": 384, "global_batch": 24},
            {"--global-batch 96"},
        ),
        ({"model": "gpt2", "gpus": 64, "gpu": "rtx4090", "global_batch": 64}, {"--gpus 4", "--global-batch 256"}),
        (
            {"model": "mistral-7b", "gpus": 1, "gpu": "a100-80gb", "global_batch": 8},
            {"--optimizer adamw-8bit", "--precision bf16-pure"},
        ),
        ({"model": "llama-3-8b", "gpus": 8, "gpu": "h100", "global_batch": 64, "seq_len": 2048}, {"--compile"}),
        ({"model": "gpt-oss-20b", "gpus": 8, "gpu": "h100", "global_batch": 8}, {"--attention flash"}),
    ],
)
@pytest.mark.sweep(every=2)
def test_what_is_promised_is_what_asking_so_gives(flags: dict[str, object], expected: set[str]) -> None:
    given = answer(**flags)
    advice = given.advice()
    assert expected <= {item.flag for item in advice}
    assert len(advice) <= MOST_OFFERED
    here = given.plans[0].throughput.samples_per_second
    for item in advice:
        there = answer(**asked_so(flags, item.flag)).plans[0]
        fewer = given.plans[0].configuration.world_size / there.configuration.world_size
        # Asked so, the whole space is searched, where a simpler plan may go before the trial within a threshold.
        assert there.throughput.samples_per_second / here * fewer > item.speed / 1.15
        assert item.speed >= 1 + WORTH_SAYING or item.flag.startswith("--gpus")


def test_a_larger_batch_of_rounds_has_more_prompts() -> None:
    """A global batch of several rounds is refused, and would share one round's generation among them."""
    flags = {"model": "Qwen/Qwen2.5-7B", "gpus": 8, "gpu": "h100", "task": "grpo", "completion_len": "1024:4096"}
    flags |= {"rollout": "colocate", "generations": 8, "prompts_per_step": 32, "global_batch": 256}
    given = answer(**flags)
    larger = next(item for item in given.advice() if "--global-batch" in item.flag)
    assert larger.flag == "--prompts-per-step 128 --global-batch 1024"
    there = answer(**asked_so(flags, larger.flag)).plans[0].throughput.samples_per_second
    assert there / given.plans[0].throughput.samples_per_second == pytest.approx(larger.speed, rel=0.1)


def test_where_cost_counts_a_change_is_compared_on_the_devices_of_the_plan() -> None:
    """More devices than the cheapest plan takes would make anything faster."""
    request = Question(model="llama-3-8b", gpus=32, gpu="h100", global_batch=64).request(objective="cost")
    cheapest = recommend(request)
    gpus = cheapest.plans[0].configuration.world_size
    assert gpus < 32
    fewer = recommend(Question(model="llama-3-8b", gpus=gpus, gpu="h100", global_batch=64, compile=True).request())
    advice = {item.flag: item.speed for item in cheapest.advice()}
    gain = fewer.plans[0].throughput.samples_per_second / cheapest.plans[0].throughput.samples_per_second
    assert 1 + WORTH_SAYING <= advice["--compile"] < 1.15 * gain  # all 32 were 4.1 times as fast


def test_nothing_is_advised_of_a_busy_cluster_and_of_scripts() -> None:
    busy = {"model": "llama-3.1-70b", "gpus": 64, "gpu": "h100", "code": "megatron", "seq_len": 8192}
    assert answer(**busy, global_batch=512).advice() == ()
    from dataclasses import replace

    request = replace(answer(model="gpt2", gpus=8, gpu="a100-80gb").request, strategies=("ddp",))
    assert recommend(request).advice() == ()


def test_a_trainer_of_another_kind_is_not_advised() -> None:
    flags = {"model": "llama-2-7b", "gpus": 8, "gpu": "A100-40", "seq_len": 2048, "global_batch": 64}
    assert "--code torchtitan --compile" in {item.flag for item in answer(**flags).advice()}
    assert not [item.flag for item in answer(**flags, task="dpo").advice() if "--code" in item.flag]
