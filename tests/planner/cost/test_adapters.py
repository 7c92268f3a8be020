"""Adapters, frozen weights and dtypes that weights are loaded as: what they cost in memory and in time."""

from __future__ import annotations

from typing import Any

import pytest

from hardware_db.units import GIB
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.code_bases import BlockTraits, Traits
from planner.cost.memory import memory_estimate
from planner.cost.memory.activations.blocks import code_form
from planner.cost.memory.activations.form import find_form, structure_of, subtract
from planner.cost.timing import step_time
from planner.cost.timing.flops import model_flops
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import job_of, why_impossible
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.types.job import Job


def request_of(model: str = "llama-3-8b", gpus: int = 1, gpu: str = "A100-80GB", **work: Any) -> Request:
    cluster = resolve_cluster(HardwareRequest(gpu=gpu, gpus=gpus))
    options = WorkOptions(**{"seq_len": 1024, "precision": "bf16", **work})
    return make_request(find_model(model), cluster, options)


def job_for(model: str = "llama-3-8b", plan: dict[str, Any] | None = None, *, gpus: int = 1, **work: Any) -> Job:
    request, configuration = exact(request_of(model, gpus, **work), ExactOptions(**(plan or {})))
    return job_of(request, configuration)


@pytest.mark.parametrize(
    ("model", "targets", "rank", "trainable"),
    [
        # PEFT 0.21's print_trainable_parameters() of these models on the meta device.
        ("llama-3-8b", "q_proj,v_proj", 8, 3_407_872),
        ("llama-3-8b", "all-linear", 16, 41_943_040),
        ("llama-3-8b", r".*\.self_attn\.(q|v)_proj", 8, 3_407_872),
        ("gpt2", "c_attn", 8, 294_912),
        ("opt-1.3b", "attention", 8, 24 * 4 * 8 * 2 * 2048),
    ],
)
def test_adapters_have_the_weights_that_peft_gives_them(model: str, targets: str, rank: int, trainable: int) -> None:
    counts = request_of(model, method="lora", lora_targets=targets, lora_rank=rank).counts
    assert counts.trained.total == trainable
    assert counts.held.total == find_model(model).parameters
    assert counts.total == counts.trained.total + counts.held.total


def test_dora_adds_a_magnitude_for_each_output() -> None:
    lora, dora = (request_of(method=method, lora_rank=8).counts.trained.total for method in ("lora", "dora"))
    outputs = 32 * (4096 + 1024 + 1024 + 4096 + 2 * 14336 + 4096)
    assert dora - lora == outputs


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (
            {"method": "lora", "lora_targets": "nothing"},
            "it has q_proj, k_proj, v_proj, o_proj, gate_proj",
        ),
        ({"method": "lora", "lora_targets": "(["}, "is no regular expression"),
        ({"method": "qlora", "load_dtype": "bf16"}, "use --method lora"),
        ({"load_dtype": "nf4"}, "cannot be trained; use --method qlora"),
        ({"method": "lora", "train_only": "norm"}, "leave one out"),
        ({"train_only": "nothing"}, "names are like model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight"),
        ({"train_only": "."}, "matches every weight"),
        ({"train_only": "*"}, "is no regular expression"),
        ({"load_dtype": "fp32", "precision": "bf16-pure"}, "use --precision bf16"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(work: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContradictoryRequest) as refused:
        request_of(**work)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_taken_for_granted_of_adapters_is_said() -> None:
    assumed = " ".join(request_of(method="qlora").defaults)
    for flag in ("--lora-rank", "--lora-targets", "nf4 (--load-dtype)"):
        assert flag in assumed


def test_a_frozen_base_has_the_dtype_it_is_loaded_as_and_no_gradients() -> None:
    weights = {
        loaded: memory_estimate(job_for(method="lora", load_dtype=loaded)).parameters_bytes / GIB
        for loaded in ("fp32", "bf16", "nf4")
    }
    assert weights["fp32"] == pytest.approx(2 * weights["bf16"], rel=0.01)
    # 6.98 B parameters in linear layers of half a byte and 8.25/64 of a byte more for scales, 1.05 B of two bytes.
    assert weights["nf4"] == pytest.approx((6.979e9 * (0.5 + 8.125 / 8 / 64) + 1.051e9 * 2) / GIB, rel=0.02)
    full, lora = (memory_estimate(job_for(method=method)).states for method in ("full", "lora"))
    assert lora["gradients_bytes"] < full["gradients_bytes"] / 300
    assert lora["optimizer_bytes"] < full["optimizer_bytes"] / 300


def test_training_the_last_blocks_alone_keeps_nothing_of_the_others() -> None:
    last = r"layers\.(28|29|30|31)\."
    some, every = job_for(train_only=last), job_for()
    assert [block.repeats for block in some.counts.blocks] == [28, 4]
    kept = {name: memory_estimate(job).phases["loss"] for name, job in (("some", some), ("every", every))}
    weights_and_moments = 4 * 3 * every.counts.total - 4 * every.counts.total - 8 * some.counts.trained.total
    assert kept["every"] - kept["some"] > weights_and_moments
    # A forward of all blocks, a backward of four of thirty-two.
    assert model_flops(some) / model_flops(every) == pytest.approx((1 + 2 * 4 / 32) / 3, rel=0.08)


def test_frozen_weights_take_a_third_of_the_work_off() -> None:
    full, lora = job_for(), job_for(method="lora", lora_targets="q_proj,v_proj")
    assert model_flops(lora) / model_flops(full) == pytest.approx(2 / 3, rel=0.03)
    assert 0.6 < step_time(lora).compute_seconds / step_time(full).compute_seconds < 0.85
    assert step_time(lora).optimizer_seconds < step_time(full).optimizer_seconds / 300


def test_only_the_gradients_of_adapters_are_reduced() -> None:
    full, lora = (job_for(gpus=8, plan={"strategy": "ddp"}, method=method) for method in ("full", "lora"))
    assert step_time(lora).communication_seconds < step_time(full).communication_seconds / 20


def test_fsdp_gathers_a_quantised_base_as_it_is_stored() -> None:
    lora, qlora = (job_for(gpus=8, plan={"strategy": "fsdp"}, method=method) for method in ("lora", "qlora"))
    assert step_time(qlora).communication_seconds < 0.5 * step_time(lora).communication_seconds
    assert memory_estimate(qlora).peak_allocated_bytes < memory_estimate(lora).peak_allocated_bytes


def test_frozen_blocks_are_those_of_the_code_that_runs() -> None:
    """Of the traits that transformers' modules have, a written block of Llama keeps what was traced of a frozen one."""
    facts = find_model("llama-3-8b")
    traced = find_form(structure_of(facts), ["cuda frozen pure sdpa"])
    assert traced is not None
    written = code_form(facts, Traits(block=BlockTraits()), "pure", "sdpa", adds_in_place=False, frozen=True)
    fixed = {"": 24.0}  # the fused kernel's random state
    expected, written_block = traced.form.blocks["block"], written.blocks["block"]
    assert subtract(expected.kept, fixed) == written_block.kept
    assert subtract(expected.products, fixed) == written_block.products
    assert all(not moment.gradients for moment in (*written_block.backward, *written.loss_backward))


@pytest.mark.parametrize(("flags", "least"), [({"loss": "chunked"}, 4.5), ({"loss": "fused"}, 4.5)])
def test_a_loss_without_all_logits_saves_their_copies_beside_adapters_too(flags: dict[str, Any], least: float) -> None:
    plan = {"checkpointing": "full", "micro_batch": 2}
    work = {"method": "lora", "precision": "bf16-pure", "seq_len": 2048, "code": "torch"}
    plain, other = (memory_estimate(job_for("llama-3-8b", plan, **work, **each)) for each in ({}, flags))
    logits = 2 * 2048 * 128256
    assert plain.peak_allocated_bytes - other.peak_allocated_bytes > least * logits


def test_code_changes_memory_beside_adapters() -> None:
    peaks = {
        code: memory_estimate(job_for(method="lora", precision="bf16-pure", code=code, compile=compiled))
        for code, compiled in (("transformers", False), ("torch", True))
    }
    saved = peaks["transformers"].peak_allocated_bytes - peaks["torch"].peak_allocated_bytes
    # Norms that are one kernel, and an MLP whose activated gate is made again.
    assert saved > 32 * 1024 * (4 * 4096 + 2 * 14336)


@pytest.mark.parametrize(("model", "strategy", "parts"), [("llama-2-70b", "zero3", 4), ("llama-2-7b", "zero2", 1)])
def test_deepspeed_has_no_place_for_gradients_of_frozen_weights(model: str, strategy: str, parts: int) -> None:
    plan = {"strategy": strategy, "checkpointing": "full", "grad_accum": 8, "backend": "deepspeed"}
    memory = memory_estimate(job_for(model, plan, gpus=4, method="lora", lora_rank=64, seq_len=256))
    weights = 2 * find_model(model).parameters / parts
    assert memory.gradients_bytes < weights / 20
    assert memory.phases["load"] < 1.1 * weights + 1.5 * GIB
    assert memory.peak_allocated_bytes < 1.4 * weights + 4 * GIB


def test_litgpt_keeps_what_its_bitsandbytes_and_its_loop_keep() -> None:
    """Lightning-AI/litgpt@8641822 tutorials/resource-tables.md: one A100, bf16-true, queries and values of rank 8."""
    work = {"precision": "bf16-pure", "lora_targets": "q_proj,v_proj", "seq_len": 1304, "code": "litgpt-2024"}
    printed = {("llama-2-7b", "lora"): 21.30, ("llama-2-7b", "qlora"): 14.14, ("llama-2-13b", "qlora"): 23.14}
    for (model, method), gigabytes in printed.items():
        memory = memory_estimate(job_for(model, {"grad_accum": 128}, method=method, **work))
        assert memory.peak_allocated_bytes / 1e9 == pytest.approx(gigabytes, rel=0.06), (model, method)
    counts = request_of("gemma-2b", code="litgpt").counts
    assert counts.head == 256000 * 2048  # never tied


@pytest.mark.parametrize(("gpus", "printed_gb"), [(2, 22.18), (4, None)])
def test_fabric_reads_a_checkpoint_into_weights_gathered_whole(gpus: int, printed_gb: float | None) -> None:
    job = job_for(
        "llama-2-7b",
        {"strategy": "fsdp", "checkpointing": "full"},
        gpus=gpus,
        code="litgpt-2024",
        method="lora",
        precision="bf16-pure",
        seq_len=1304,
    )
    memory, weights = memory_estimate(job), 2 * find_model("llama-2-7b").parameters
    assert memory.peak_phase == "load"
    assert memory.phases["load"] == pytest.approx(weights * (1 + 1 / gpus), rel=0.02)
    if printed_gb:
        assert memory.peak_allocated_bytes / 1e9 == pytest.approx(printed_gb, rel=0.1)


# Small optimizers.


@pytest.mark.parametrize(
    ("optimizer", "printed"),
    # torchao/optim/README.md at 072500abcfbd: Llama-2-7B in bf16 on one A100, GB as printed; batch not given.
    [("adamw-fused", 51.6), ("adamw-8bit", 39.3), ("adamw-4bit", 33.2)],
)
def test_published_memory_of_small_optimizers(optimizer: str, printed: float) -> None:
    job = job_for("llama-2-7b", {"checkpointing": "full"}, optimizer=optimizer, precision="bf16-pure", seq_len=512)
    assert memory_estimate(job).peak_allocated_bytes / GIB == pytest.approx(printed, rel=0.05)


def test_paged_moments_are_on_the_host_only_where_the_device_is_short() -> None:
    plan = {"checkpointing": "full"}
    roomy, plain = (
        job_for("llama-2-7b", plan, optimizer=optimizer, precision="bf16-pure")
        for optimizer in ("adamw-8bit-paged", "adamw-8bit")
    )
    difference = memory_estimate(plain).peak_allocated_bytes - memory_estimate(roomy).peak_allocated_bytes
    assert difference == pytest.approx(2 * 6.74e9 * (1 + 4 / 256), rel=0.01)
    assert step_time(roomy).step_seconds == pytest.approx(step_time(plain).step_seconds)
    short = job_for("llama-2-7b", plan, gpu="RTX-4090", optimizer="adamw-8bit-paged", precision="bf16-pure")
    assert step_time(short).offload_seconds > 0.5


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest() -> None:
    job = job_for("llama-2-7b", optimizer="muon")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = job.counts.total - matrices
    assert memory_estimate(job).states["optimizer_bytes"] == pytest.approx(4 * matrices + 8 * rest, rel=0.001)
    assert step_time(job).optimizer_seconds > 5 * step_time(job_for("llama-2-7b")).optimizer_seconds


def test_muon_is_refused_where_matrices_are_cut() -> None:
    request, configuration = exact(
        request_of("llama-2-7b", 8, optimizer="muon"), ExactOptions(strategy="zero2", backend="deepspeed")
    )
    assert "use backend native, fsdp or ddp" in str(why_impossible(request, configuration))


# Copies of the weights, and tasks whose samples are pairs.


def test_a_reference_model_is_a_second_copy_and_a_second_forward() -> None:
    plain, dpo = job_for(), job_for(task="dpo")
    more = memory_estimate(dpo).parameters_bytes - memory_estimate(plain).parameters_bytes
    assert more == pytest.approx(4 * plain.counts.total, rel=0.001)
    # Two sequences for one, and for each two forwards and a backward in place of one and a backward.
    assert model_flops(dpo) / model_flops(plain) == pytest.approx(2 * 4 / 3)
    assert 1.8 < step_time(dpo).compute_seconds / step_time(plain).compute_seconds < 2 * 4 / 3
    narrow = job_for(task="dpo", load_dtype="bf16")
    assert memory_estimate(narrow).parameters_bytes == pytest.approx(2 * 2 * plain.counts.total, rel=0.001)


def test_adapters_need_no_second_copy_for_a_reference() -> None:
    weights = {task: memory_estimate(job_for(method="lora", task=task)) for task in ("causal-lm", "dpo")}
    assert weights["dpo"].parameters_bytes == weights["causal-lm"].parameters_bytes
    assert weights["dpo"].phases["loss"] > weights["causal-lm"].phases["loss"]


def test_a_reward_model_has_one_label_and_pairs() -> None:
    job = job_for(task="reward")
    assert job.facts.num_labels == 1
    assert job.counts.head == 4096
    assert job.sequences == 2 * job.configuration.micro_batch_size


def test_an_average_of_the_weights_is_as_large_as_what_is_trained_and_sharded_with_it() -> None:
    for strategy, copies in (("ddp", 1), ("fsdp", 8)):
        with_average, without = (
            memory_estimate(job_for("llama-2-7b", {"strategy": strategy}, gpus=8, ema=ema)) for ema in (True, False)
        )
        more = with_average.parameters_bytes - without.parameters_bytes
        assert more == pytest.approx(4 * 6.738e9 / copies, rel=0.01)
    adapters = job_for(method="lora", ema=True)
    more = memory_estimate(adapters).parameters_bytes - memory_estimate(job_for(method="lora")).parameters_bytes
    assert more == pytest.approx(4 * adapters.counts.trained.total, rel=0.02)
