"""Post-training in numbers: lengths of completions, memory and seconds of a round, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.generation import ENGINE_BYTES, engines_of
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.rollout import with_traced
from planner.cost.timing.efficiency import rates_of
from planner.cost.timing.rollout import decode_seconds
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import estimate, job_of
from planner.search.exact import ExactOptions, exact
from planner.search.post_training import training_cluster
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Plan
from planner.types.plan_io import plan_from_dict, plan_to_dict
from planner.types.post_training import PostTraining

GIB = 1 << 30


CHOSEN = ("strategy", "backend", "checkpointing", "steps_per_generation")


def plan(model: str = "llama-3-8b", gpus: int = 8, gpu: str = "H100-SXM5-80GB", micro: int = 2, **work: Any) -> Plan:
    """Return the estimate of a question, `strategy` and `checkpointing` among what is asked."""
    chosen = {name: work.pop(name) for name in CHOSEN if name in work}
    options = WorkOptions(**{"task": "grpo", **work})
    cluster = training_cluster(resolve_cluster(HardwareRequest(gpus=gpus, gpu=gpu)), options)
    request = make_request(find_model(model), cluster, options)
    configuration = ExactOptions(
        **{"strategy": "zero2", "checkpointing": "full", **chosen},
        micro_batch=micro,
        global_batch=options.global_batch,
        prompts_per_step=options.prompts_per_step,
    )
    return estimate(*exact(request, configuration))


ROUND: dict[str, Any] = {"prompt_len": 512, "completion_len": "800:2k", "generations": 8, "prompts_per_step": 64}


@pytest.mark.parametrize(("mean", "longest"), [(100, 1000), (500, 1000), (900, 1000), (1000, 1000)])
def test_lengths_have_the_mean_and_the_bound_that_were_stated(mean: int, longest: int) -> None:
    post = PostTraining(prompt_length=10, completion_length=mean, completion_max=longest)
    width = longest / 1000
    assert sum(width * post.surviving((index + 0.5) * width) for index in range(1000)) == pytest.approx(mean, rel=0.01)
    assert post.surviving(longest) == 0
    assert mean * 0.99 <= post.longest_of(1) <= post.longest_of(8) <= post.longest_of(1000) <= longest


def test_dpo_of_a_7b_does_not_fit_where_it_ran_out_of_memory() -> None:
    """llama-2-7b, ZeRO-2, 8 x A100-40GB, 4 pairs of 2,048 tokens, full recomputation takes 44 GiB."""
    dpo = plan("llama-2-7b", gpu="A100-SXM4-40GB", micro=4, task="dpo", seq_len=2048)
    assert dpo.memory.peak_allocated_bytes == pytest.approx(44 * GIB, rel=0.02)
    assert dpo.verdict == "does_not_fit"
    precomputed = plan("llama-2-7b", gpu="A100-SXM4-40GB", micro=4, task="dpo", seq_len=2048, precompute_ref=True)
    assert dpo.memory.parameters_bytes - precomputed.memory.parameters_bytes == pytest.approx(2 * 6.738e9, rel=0.01)
    assert precomputed.time.compute_seconds < 0.85 * dpo.time.compute_seconds


@pytest.mark.parametrize(("backend", "width"), [("deepspeed", 2 / 8), ("native", 4)])
def test_a_reference_is_sharded_by_deepspeed_and_not_by_our_own_zero(backend: str, width: float) -> None:
    """TRL's `prepare_deepspeed` cuts it, in 16 bits; under our own work its `prepare_model` leaves it as it is."""
    work: dict[str, Any] = {"model": "llama-2-7b", "task": "dpo", "seq_len": 1024, "strategy": "zero3"}
    dpo, alone = (plan(backend=backend, precompute_ref=without, **work) for without in (False, True))
    reference = dpo.memory.phases["step"] - alone.memory.phases["step"]
    assert reference == pytest.approx(width * 6.738e9, rel=0.05)


def test_a_reference_of_fsdp2_is_whole_in_its_forward() -> None:
    """Weights in 16 bits and the buffer they came in, as `prepare_fsdp` of TRL 1.16 makes one unit of it."""
    work: dict[str, Any] = {"model": "llama-2-7b", "task": "dpo", "seq_len": 1024, "strategy": "fsdp"}
    dpo, alone = (plan(precompute_ref=without, **work) for without in (False, True))
    assert dpo.memory.peak_phase == "loss"
    assert dpo.memory.phases["loss"] - alone.memory.phases["loss"] == pytest.approx((2 * 2 + 4 / 8) * 6.738e9, rel=0.05)


def test_tasks_have_the_loss_of_their_trainer() -> None:
    losses = {task: plan(task=task, seq_len=1024).workload["loss"] for task in ("sft", "kto", "orpo", "reward")}
    assert losses == {"sft": "tiled", "kto": "tiled", "orpo": "plain", "reward": "plain"}
    tiled, plain = (plan(task="sft", seq_len=2048, micro=4, **more) for more in ({}, {"loss": "plain"}))
    assert tiled.memory.peak_allocated_bytes < plain.memory.peak_allocated_bytes - 5 * GIB


def test_the_model_itself_keeps_keys_and_values_of_all_its_samples() -> None:
    """8B: 131 kB a token, times 64 samples of 2,560 tokens on each of 8 ranks."""
    itself = plan(**ROUND)
    beside = itself.memory.phases["generate"] - itself.memory.states["parameters_bytes"]
    cache = 131_072 * 64 * 2560
    assert beside - itself.memory.states["optimizer_bytes"] == pytest.approx(1.03 * cache, rel=0.1)
    assert itself.memory.peak_phase == "generate"
    assert "logprob" not in itself.memory.phases
    assert itself.limited_by == "generation"


def test_an_engine_takes_its_share_and_gives_it_back_where_it_sleeps() -> None:
    awake, asleep = (plan(**ROUND, rollout="colocate", rollout_sleep=sleep) for sleep in (False, True))
    share = 0.3 * awake.cluster["capacity_bytes"]
    assert awake.memory.phases["backward"] - asleep.memory.phases["backward"] == pytest.approx(share, rel=0.05)
    assert awake.memory.phases["generate"] == asleep.memory.phases["generate"]
    assert asleep.memory.phases["update"] == max(
        asleep.memory.phases[name] for name in ("forward", "loss", "backward", "step")
    )


def test_an_engine_without_room_for_the_weights_does_not_fit() -> None:
    small = plan(**ROUND, rollout="colocate", rollout_memory=0.15)
    assert small.verdict == "does_not_fit"
    assert "an engine needs" in small.notes[0]
    assert plan(**ROUND, rollout="colocate", rollout_memory=0.15, rollout_tp=4).verdict != "does_not_fit"


def test_a_reference_model_is_there_where_beta_is_not_0() -> None:
    without, with_one = (plan(**ROUND, beta=beta) for beta in (0.0, 0.04))
    assert with_one.memory.phases["step"] - without.memory.phases["step"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert "reference" in with_one.time.phases
    assert "reference" not in without.time.phases


def test_phases_make_the_round_and_steps_share_it() -> None:
    one = plan(**ROUND, rollout="colocate")
    several = plan(**ROUND, rollout="colocate", global_batch=128, num_iterations=2)
    for each, steps in ((one, 1), (several, 8)):
        assert each.time.round_seconds is not None
        assert sum(each.time.phases.values()) == pytest.approx(each.time.round_seconds)
        assert each.time.step_seconds == pytest.approx(each.time.round_seconds / steps)
        parts = ("compute", "exposed_communication", "offload", "optimizer", "bubble")
        assert sum(getattr(each.time, f"{name}_seconds") for name in parts) == pytest.approx(each.time.step_seconds)
    assert several.time.phases["update"] == pytest.approx(2 * one.time.phases["update"], rel=0.1)
    assert several.time.phases["generate"] == one.time.phases["generate"]


def test_generation_ahead_of_training_takes_place_beside_it() -> None:
    apart = {**ROUND, "rollout": "server", "rollout_gpus": 4}
    waits, ahead = (plan(**apart, steps_off=off) for off in (0, 1))
    assert waits.configuration.world_size == ahead.configuration.world_size == 4
    assert waits.time.round_seconds is not None
    assert ahead.time.round_seconds is not None
    training = waits.time.round_seconds - waits.time.phases["generate"]
    assert ahead.time.round_seconds == pytest.approx(max(training, waits.time.phases["generate"]), rel=0.01)


def test_decoding_reads_weights_once_for_all_sequences() -> None:
    """On one sequence a step takes at least the weights over the bandwidth: 16 GB at 3.35e12 B/s, 4.8 ms a token."""
    alone = {"generations": 8, "prompts_per_step": 1, "prompt_len": 1, "completion_len": "1000", "rollout": "colocate"}
    seconds = plan(**alone, global_batch=8, micro=1).time.phases["generate"]
    assert 4.8 < seconds < 8
    crowd = plan(**{**alone, "prompts_per_step": 64}, global_batch=512, micro=1).time.phases["generate"]
    assert crowd < 4 * seconds


def job(model: str = "llama-3-8b", gpu: str = "H100-SXM5-80GB", **work: Any) -> Job:
    """Return the job of a colocated round."""
    options = WorkOptions(**{"task": "grpo", "rollout": "colocate", **ROUND, **work})
    request = make_request(find_model(model), resolve_cluster(HardwareRequest(gpus=8, gpu=gpu)), options)
    exactly = ExactOptions(strategy="zero2", prompts_per_step=64)
    request, configuration = exact(request, exactly)
    return job_of(request, configuration)


def token_seconds(model: str, gpu: str, sequences: int, context: int) -> float:
    """Return the seconds of a decoding step of an engine of one GPU."""
    colocated = job(model, gpu, rollout_memory=0.9)
    rates = rates_of(colocated)
    return decode_seconds(colocated, engines_of(colocated), rates, sequences=sequences, context=context)


@pytest.mark.parametrize(
    ("model", "gpu", "context", "least", "most"),
    [
        # At most half of an H100's bandwidth for 2.47 GB (Hazy Research, "Look Ma, No Bubbles", May 2025).
        ("unsloth/Llama-3.2-1B", "H100-SXM5-80GB", 96, 1.48e-3, 2.0e-3),
        # 9.6 and 10.6 ms a token (tenstorrent/tt-inference-server issue 340), 128 and 8,192 tokens of prompt.
        ("Qwen/Qwen3-30B-A3B", "A100-SXM4-80GB", 192, 0.75 * 9.6e-3, 1.05 * 9.6e-3),
        ("Qwen/Qwen3-30B-A3B", "A100-SXM4-80GB", 8256, 0.7 * 10.6e-3, 1.05 * 10.6e-3),
    ],
)
def test_a_token_of_one_sequence_takes_what_others_measured(
    model: str, gpu: str, context: int, least: float, most: float
) -> None:
    """Bytes alone would be 0.9, 3.5 and 4.0 ms: the rest are kernels one after the other."""
    assert least <= token_seconds(model, gpu, 1, context) <= most


def test_the_host_of_an_engine_sees_to_each_sequence() -> None:
    """256 sequences leave GPUs idle for 5 to 6 ms (vllm-project/vllm issue 10634); products add 1.0, logits 0.6 ms."""
    one, many = (token_seconds("unsloth/Llama-3.2-1B", "H100-SXM5-80GB", count, 0) for count in (1, 256))
    assert 5e-3 <= many - one <= 9e-3


def test_a_traced_update_has_an_engine_beside_it() -> None:
    colocated = job(rollout_memory=0.3)
    traced = {"forward": Ledger(), "step": Ledger(optimizer=5.0)}
    phases = with_traced(colocated, {"load": Ledger(parameters=1.0)}, traced)
    engine = 0.3 * colocated.cluster.capacity_bytes
    assert phases["load"].total == 1.0
    assert phases["update"] == phases["step"] == Ledger(optimizer=5.0, buffers=engine)


def test_the_cache_of_an_engine_decides_how_many_sequences_it_decodes() -> None:
    """vLLM's budget of a card: its share less the weights and 1.87 GiB is keys and values, 131 kB a token of 8B."""
    engines = engines_of(job())
    rest = 0.3 * job().cluster.capacity_bytes - 2 * 8.03e9 - ENGINE_BYTES
    assert engines.at_a_time == pytest.approx(rest / (131_072 * (512 + 400)), rel=0.02)
    assert engines_of(job(rollout_tp=2)).at_a_time > 2 * engines.at_a_time


def test_a_plan_remembers_its_round() -> None:
    written = plan(**ROUND, rollout="colocate", rollout_sleep=True, beta=0.04)
    assert plan_from_dict(plan_to_dict(written)) == written


def test_micro_batches_count_the_samples_of_a_generation() -> None:
    """TRL's `steps_per_generation` 4 at micro-batch 2 on 8 ranks makes 64 completions, of 8 prompts."""
    answer = plan(prompt_len=64, completion_len="64", global_batch=16, steps_per_generation=4)
    assert answer.workload["prompts_per_step"] == 8
    assert answer.time.round_seconds == pytest.approx(4 * answer.time.step_seconds)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        ({"task": "sft", "generations": 4}, "--generations is for --task grpo or ppo"),
        ({"task": "causal-lm", "rollout": "server"}, "--rollout is for --task grpo or ppo, not causal-lm"),
        ({"task": "causal-lm", "beta": 0.0}, "--beta is for --task dpo or kto or orpo or grpo or ppo, not causal-lm"),
        ({"task": "sft", "beta": 0.1}, "--beta is for --task dpo or kto or orpo or grpo or ppo, not sft"),
        ({"task": "causal-lm", "prompt_len": 4}, "--prompt-len is for --task sft"),
        ({"task": "grpo", "precompute_ref": True}, "--precompute-ref is for --task dpo or kto"),
        ({"completion_len": "800:400"}, "MEAN or MEAN:MAX"),
        ({"completion_len": "lots"}, "MEAN or MEAN:MAX"),
        ({"prompt_len": 500, "completion_len": "500", "seq_len": 900}, "--seq-len 900 is not the prompt's 500"),
        ({"prompts_per_step": 3, "global_batch": 16}, "no whole number of optimizer steps of 16"),
        ({"rollout": "server"}, "say how many with --rollout-gpus"),
        (
            {"rollout": "colocate", "rollout_gpus": 8},
            "--rollout-gpus 8 is for --rollout server, not colocate; drop one",
        ),
        ({"rollout": "colocate", "rollout_tp": 3}, "--rollout-tp 3 does not divide the 32 attention heads"),
        ({"rollout": "colocate", "rollout_tp": 16}, "does not divide the 8 GPUs of training .* use 1, 2, 4 or 8$"),
        ({"rollout_gpus": 8}, "leaves none of 8 GPUs"),
        ({"rollout_gpus": 2, "rollout_tp": 4}, "--rollout-tp 4 does not divide the 2 GPUs of generation"),
    ],
)
def test_contradictions_are_refused(work: dict[str, Any], problem: str) -> None:
    with pytest.raises(ContradictoryRequest, match=problem):
        plan(**work)


def test_a_value_model_takes_states_as_the_trained_one_and_less_time() -> None:
    """verl's quick start: 344 tokens of Qwen2.5-0.5B, updates of the critic 15.7 s beside the actor's 20.3 (0.77).

    Its card is not named. Of its seconds without generation 0.78 are updates, and 8.3 references make one.
    """
    work: dict[str, Any] = {"prompt_len": 104, "completion_len": "239:256", "generations": 1, "beta": 0.001}
    work |= {"prompts_per_step": 256, "global_batch": 64, "rollout": "colocate", "rollout_sleep": True}
    ppo, grpo = (
        plan("Qwen/Qwen2.5-0.5B", 1, "L4-24GB", 4, task=task, strategy="single", **work) for task in ("ppo", "grpo")
    )
    updates = ppo.time.phases["update"], grpo.time.phases["update"]
    assert updates[0] / updates[1] - 1 == pytest.approx(0.77, rel=0.1)
    assert updates[0] / ppo.time.phases["reference"] == pytest.approx(8.3, rel=0.1)
    assert ppo.memory.optimizer_bytes == pytest.approx(2 * grpo.memory.optimizer_bytes, rel=0.01)
    assert ppo.memory.phases["reward"] > grpo.memory.phases["reference"]
