"""A traced step against real steps: storage by storage in one process, and on gloo ranks under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.measured_rows import SHIPPED, read_memory_runs
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.estimate import phases_of
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import price
from planner.types.job import Job, Workload
from planner.types.plan import Configuration
from scripts.measure.compositions import question, read_compositions
from scripts.measure.gloo import quiet
from scripts.measure.modules import language_module, token_batch
from strategies.tracing.live import facts_from_module
from strategies.tracing.module_trace import traced_facts
from strategies.tracing.step.build import Subject, own_subject, subject_of
from strategies.tracing.step.refusal import TraceFailed, guard
from strategies.tracing.step.step import trace_step
from tests.strategies.tracing import trace_bodies as bodies

SAMPLES, LENGTH, RANKS = 2, 128, 2
NARROW: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256, "intermediate_size": 256}
GROUPED = {**NARROW, "num_key_value_heads": 2, "head_dim": 16}


def configuration_of(
    *, strategy: str = "single", ranks: int = 1, accumulation: int = 1, **chosen: Any
) -> Configuration:
    replicated = strategy in ("single", "ddp")
    fields: dict[str, Any] = {
        "strategy": strategy,
        "backend": "torch",
        "dp_replicate": ranks if replicated else 1,
        "dp_shard": 1 if replicated else ranks,
        "micro_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": SAMPLES * accumulation * ranks,
        "sequence_length": LENGTH,
        "precision": "fp32",
        "optimizer": "adamw",
    }
    return Configuration(**{**fields, **chosen})


def job_of(facts: ModelFacts, configuration: Configuration, gpu: str = "cpu") -> Job:
    workload = Workload(
        task="causal-lm", sequence_length=LENGTH, global_batch_size=configuration.global_batch_size, precision="fp32"
    )
    cluster = resolve_cluster(HardwareRequest(gpus=configuration.world_size, gpu=gpu))
    counts = count_parameters(facts)
    return Job(facts=facts, counts=counts, workload=workload, cluster=cluster, configuration=configuration)


def llama(depth: int = 2) -> Subject:
    return subject_of(find_model("llama-3-8b"), layers=depth, overrides=GROUPED)


@pytest.mark.parametrize(
    ("model", "overrides", "chosen"),
    [
        ("llama-3-8b", GROUPED, {"precision": "fp32", "optimizer": "sgd"}),
        ("llama-3-8b", GROUPED, {"precision": "bf16-pure", "accumulation": 2}),
        ("llama-3-8b", GROUPED, {"precision": "bf16", "activation_checkpointing": "full"}),
        ("llama-3-8b", GROUPED, {"precision": "bf16", "activation_checkpointing": "selective"}),
        ("bert-base-uncased", NARROW, {"precision": "bf16", "optimizer": "adamw-fused"}),
        ("mixtral-8x7b", {**GROUPED, "num_local_experts": 4}, {"precision": "bf16", "optimizer": "adafactor"}),
    ],
)
@pytest.mark.sweep(every=6)
def test_a_trace_is_what_a_real_step_of_one_process_uses(
    model: str, overrides: dict[str, object], chosen: dict[str, Any]
) -> None:
    configuration = configuration_of(**chosen)
    subject = subject_of(find_model(model), layers=2, overrides=overrides)
    traced = trace_step(job_of(find_model(model), configuration), subject)
    assert traced.totals == pytest.approx(bodies.single_peaks(subject, configuration), rel=0.001)


@pytest.fixture(scope="module")
def pool(new_pool: Callable[..., RankPool]) -> Iterator[RankPool]:
    with new_pool(RANKS) as ranks:
        yield quiet(ranks)


@pytest.mark.parametrize(
    ("strategy", "precision", "accumulation"),
    [("ddp", "bf16", 1), ("fsdp", "bf16", 1), ("fsdp", "fp32", 2), ("fsdp-grad-op", "bf16", 1)],
)
@pytest.mark.sweep(every=4)
def test_a_trace_is_what_a_rank_among_others_uses(
    pool: RankPool, strategy: str, precision: str, accumulation: int
) -> None:
    configuration = configuration_of(strategy=strategy, ranks=RANKS, precision=precision, accumulation=accumulation)
    real = pool.run(bodies.rank_peaks, configuration)[0]
    traced = trace_step(job_of(find_model("gpt2"), configuration), bodies.Own())
    assert traced.totals == pytest.approx(real, rel=0.01)


MEASURED = {
    (run.model, run.strategy): run
    for run in read_memory_runs(SHIPPED / "memory_cpu.csv")
    if run.outcome == "completed" and run.world_size == 2
}


@pytest.mark.parametrize(
    ("model", "strategy"), [("t5", "ddp"), ("mixtral", "fsdp"), ("gemma2", "fsdp"), ("opt", "fsdp-grad-op")]
)
@pytest.mark.sweep(every=4)
def test_a_trace_is_what_was_measured_of_the_engine(model: str, strategy: str) -> None:
    run = MEASURED[model, strategy]
    facts = facts_from_config(run.model_config, model)
    arguments = {name: value for name, value in run.model_config.items() if name != "model_type"}
    # What runs do not name was not varied.
    chosen = {item.name: getattr(run, item.name) for item in fields(Configuration) if hasattr(run, item.name)}
    configuration = Configuration(**chosen)
    job = job_of(facts, configuration)
    subject = subject_of(facts, attention=configuration.attention, overrides=arguments)
    assert trace_step(job, subject).totals == pytest.approx(run.phases, rel=0.002)


def test_the_module_is_left_as_it_was() -> None:
    own = bodies.Own()
    before = {name: weight.clone() for name, weight in own.module.state_dict().items()}
    trace_step(job_of(find_model("gpt2"), configuration_of(precision="bf16-pure")), own)
    assert all(torch.equal(before[name], weight) for name, weight in own.module.state_dict().items())
    assert all(weight.grad is None for weight in own.module.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in own.module.modules())


def test_categories_are_told_apart() -> None:
    configuration = configuration_of(precision="bf16", strategy="ddp", ranks=RANKS)
    subject = llama()
    phases = trace_step(job_of(find_model("llama-3-8b"), configuration, gpu="a100-80gb"), subject).phases
    weights = 4 * sum(weight.numel() for weight in subject.module.parameters())
    near = pytest.approx(weights, rel=0.01)  # every storage is rounded up
    step = phases["step"]
    assert (step["parameters"], step["gradients"], step["temporaries"], step["buffers"]) == (near, near, near, near)
    assert step["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    # The cast copies of all weights but the token table, which autocast does not copy.
    table = subject.module.get_input_embeddings().weight.numel()
    assert phases["loss"]["temporaries"] == pytest.approx(weights / 2 - 2 * table, rel=0.01)


@pytest.mark.slow
def test_sharding_divides_states_and_gathers_weights() -> None:
    facts, subject = find_model("llama-3-8b"), llama()
    few, many = (
        trace_step(
            job_of(facts, configuration_of(strategy="fsdp", ranks=ranks, precision="bf16"), gpu="a100-80gb"), subject
        )
        for ranks in (2, 16)
    )
    for name in ("parameters", "optimizer"):
        assert many.phases["step"][name] == pytest.approx(
            few.phases["step"][name] / 8, rel=0.1
        )  # small shards are rounded up
    assert many.phases["backward"]["buffers"] == pytest.approx(few.phases["backward"]["buffers"], rel=0.05)


@pytest.mark.slow
def test_weights_without_gradients_change_nothing_in_a_sharded_step() -> None:
    """DTensor works out the shapes of a step that it has not seen, which leaves out what has no gradient."""
    subject, unused = llama(), 4096 * 64
    subject.module.unused = nn.Linear(64, 4096, bias=False, device="meta")
    configuration = configuration_of(strategy="fsdp", ranks=8)
    traced = trace_step(job_of(find_model("llama-3-8b"), configuration, "A100-80GB"), subject).phases["step"]
    with_gradients = pytest.approx(traced["parameters"] - 4 * unused // 8, rel=0.05)  # small shards are rounded up
    assert (traced["gradients"], traced["temporaries"]) == (with_gradients, with_gradients)


@pytest.mark.parametrize(("every", "precision"), [(3, "fp32"), (2, "bf16")])
@pytest.mark.sweep(every=2)
def test_of_blocks_in_a_row_every_so_many_are_recomputed(every: int, precision: str) -> None:
    """The closed form, which an emitted config follows, and the step that the engine takes."""
    chosen = {"activation_checkpointing": "full", "precision": precision, "optimizer": "sgd"}
    facts, kept = facts_from_module(llama(6).module), []
    for gap in (1, every):
        job = job_of(facts, configuration_of(**chosen, checkpoint_every=gap))
        traced = trace_step(job, llama(6)).totals
        for phase in ("loss", "backward"):
            assert phases_of(job)[phase].total == pytest.approx(traced[phase], rel=0.01)
        kept.append(traced["loss"])
    assert kept[0] < kept[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow
def test_what_is_planned_for_frozen_weights_is_what_a_trace_shows(strategy: str) -> None:
    module = subject_of(find_model("llama-3-8b"), layers=4, overrides=GROUPED).module.requires_grad_(False)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    batch = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long), "labels": torch.zeros(2, LENGTH, dtype=torch.long)}
    facts = facts_from_module(module)
    assert facts.measured_counts is not None
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert facts.measured_counts.trained.total == trained < facts.parameters / 10
    job = job_of(facts, configuration_of(strategy=strategy, ranks=RANKS))
    job = replace(job, facts=traced_facts(facts, module, batch, "fp32", job.cluster.device))
    planned = phases_of(job)
    traced = trace_step(job, own_subject(module, facts, "sdpa", batch=batch))
    for phase in ("loss", "backward", "step"):
        assert planned[phase].total == pytest.approx(traced.totals[phase], rel=0.05)
    assert (planned["step"].gradients, planned["step"].optimizer) == pytest.approx(
        (traced.phases["step"]["gradients"], traced.phases["step"]["optimizer"]), rel=0.02
    )


@pytest.mark.slow
def test_what_is_planned_for_a_part_of_a_module_is_what_a_trace_of_its_step_shows() -> None:
    tp = cp = 2
    module = language_module({"own": "example", "layers": 3, "width": 128, "heads": 4, "length": LENGTH})
    batch = token_batch(2, LENGTH)
    facts = facts_from_module(module)
    split = configuration_of(strategy="fsdp", ranks=1, tp=tp, cp=cp, activation_checkpointing="full")
    job = job_of(facts, split)
    traced = trace_step(job, own_subject(module, facts, "sdpa", batch=batch))
    job = replace(job, facts=traced_facts(facts, module, batch, "fp32", job.cluster.device, [(tp, cp, 1, False)]))
    for phase in ("backward", "step"):
        assert phases_of(job)[phase].total == pytest.approx(traced.totals[phase], rel=0.01)


def test_a_frozen_table_leaves_a_model_what_its_config_says() -> None:
    module: Any = subject_of(find_model("gpt2"), layers=2).module
    positions = module.transformer.wpe.requires_grad_(False)
    facts = facts_from_module(module)
    assert (facts.kind, facts.model_type) == ("decoder", "gpt2")
    assert facts.measured_counts is not None
    assert facts.parameters - facts.measured_counts.trained.total == positions.weight.numel()


@pytest.mark.slow
def test_more_micro_batches_change_nothing_after_the_second() -> None:
    facts, subject = find_model("llama-3-8b"), llama()
    two, four = (
        trace_step(job_of(facts, configuration_of(accumulation=accumulation), gpu="a100-80gb"), subject)
        for accumulation in (2, 4)
    )
    assert two.phases == four.phases


class Sorting(nn.Module):
    """Reads a number out of a tensor, which a trace cannot know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())].sum() + x.sum()


class Unfollowable(bodies.Own):
    def __init__(self) -> None:
        super().__init__()
        self.module.head = nn.Sequential(self.module.head, Sorting())


def test_what_cannot_be_followed_is_named_in_one_line() -> None:
    with pytest.raises(TraceFailed) as failed:
        trace_step(job_of(find_model("gpt2"), configuration_of()), Unfollowable())
    assert failed.value.operation == "aten._local_scalar_dense.default"
    assert failed.value.module_path == "head.1"
    assert "\n" not in str(failed.value)
    assert "head.1" in str(failed.value)


def test_under_zero_weights_and_activations_are_traced_in_16_bits() -> None:
    subject = llama()
    configuration = configuration_of(strategy="zero2", ranks=RANKS, precision="bf16", backend="deepspeed")
    phases = trace_step(job_of(find_model("llama-3-8b"), configuration, gpu="a100-80gb"), subject).phases
    weights = sum(weight.numel() for weight in subject.module.parameters())
    assert set(phases) == {"forward", "loss", "backward"}
    assert phases["backward"]["parameters"] == pytest.approx(2 * weights, rel=0.01)
    assert not any(parts["optimizer"] + parts["gradients"] for parts in phases.values())


def test_flash_attention_is_told_of_a_window_without_a_mask() -> None:
    subject = subject_of(find_model("mistral-7b-v0.1"), layers=2, overrides={**GROUPED, "sliding_window": 32})
    with_mask, without = (
        trace_step(
            job_of(
                find_model("mistral-7b-v0.1"), configuration_of(precision="bf16", attention=attention), gpu="a100-80gb"
            ),
            subject,
        ).phases["forward"]["activations"]
        for attention in ("sdpa", "flash")
    )
    # Masks have no place for groups either: keys and values are repeated for all heads.
    assert with_mask > without + SAMPLES * LENGTH * LENGTH * 2


def test_what_fsdp_does_not_take_is_said() -> None:
    clip = find_model("openai/clip-vit-base-patch32")
    configuration = configuration_of(strategy="fsdp", ranks=RANKS)
    with pytest.raises(TraceFailed, match="fully_shard in CLIPModel"):
        trace_step(job_of(clip, configuration, gpu="a100-80gb"), subject_of(clip, layers=1))


@pytest.mark.parametrize(
    "how", [{"backend": "deepspeed", "offload": "optimizer"}, {"offload": "nvme"}, {"offload": "optimizer", "tp": 2}]
)
def test_a_plan_that_is_not_traced_is_refused(how: dict[str, Any]) -> None:
    offloaded = configuration_of(**{"strategy": "zero2", "backend": "native", **how})
    with pytest.raises(TraceFailed, match="offload is not traced"):
        trace_step(job_of(find_model("gpt2"), offloaded))


@pytest.mark.slow
def test_layers_that_a_rule_splits_are_traced_as_real_ranks_have_them() -> None:
    """GPT-2, for which transformers has no tensor-parallel plan, with dropout."""
    runs = (run for run in read_compositions() if run.model == "gpt2" and run.strategy == "ddp")
    run = next(run for run in runs if (run.tp, run.pp, run.world_size) == (2, 1, 2))
    job = price(*question(run)).job
    with guard():
        phases = trace_step(job, subject_of(job.facts)).phases
    assert max(sum(parts.values()) for parts in phases.values()) == pytest.approx(run.peak_allocated_bytes, rel=0.001)
