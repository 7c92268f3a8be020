"""Reading what was emitted gives the same plan, for every format that has a reader and an emitter."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as draw

from dsplan.api import estimate
from dsplan.question import Question
from planner import vocabulary as words
from planner.emit import emit
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.models.facts import ModelFacts
from planner.models.from_hf.config import facts_from_config
from planner.models.resolve import named_model
from planner.read.form import Reading
from planner.read.recognise import read_files
from planner.read.trainers import TRAINERS
from planner.search.audit import exact_options
from planner.search.exact import exact
from planner.search.request import Request
from planner.types.plan import Configuration, Plan
from tests.planner.emit.plans import catalogue_model, make_plan

SPREAD = ("strategy", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "pp_schedule", "virtual_stages")
BATCH = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
RUN = ("precision", "optimizer", "attention", "activation_checkpointing", "checkpoint_every", "offload")
WHOLE = (*SPREAD, *BATCH, *RUN, "sequence_length", "sequence_parallel")


@dataclass(frozen=True)
class Format:
    """A format: the files to read, the fields of a plan that they hold, and plans that it is asked with."""

    files: tuple[str, ...]
    fields: tuple[str, ...] = WHOLE
    strategies: tuple[str, ...] = words.STRATEGIES
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16", "bf16-pure")
    optimizers: tuple[str, ...] = ("adamw", "adamw-fused", "adamw-8bit")
    checkpointings: tuple[str, ...] = ("none", "full")
    offloads: tuple[str, ...] = ("none", "none", "optimizer", "all")
    methods: tuple[str, ...] = ("full", "full", "lora", "qlora", "dora")
    losses: tuple[str, ...] = ("plain", "fused")
    attentions: tuple[str, ...] = ("sdpa", "eager", "flash")
    degrees: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("causal-lm", "causal-lm", "sft", "dpo", "kto", "orpo", "reward")
    has_model: bool = True
    code: str = "transformers"
    splits_sequence: tuple[bool, ...] = (False,)
    """Whether tp ranks split sequences, as plans for it have it."""
    models: tuple[str, ...] = ("llama-3-8b", "llama-3.1-8b", "llama-2-7b", "qwen2.5-7b", "llama-3.2-1b")


FORMATS: dict[str, Format] = {
    "axolotl": Format(files=("axolotl.sh",), degrees=("tp",), losses=("plain", "fused", "chunked")),
    "llama-factory": Format(files=("llama_factory.sh",)),
    "ms-swift": Format(files=("ms_swift.sh",)),
    "trl": Format(files=("trl.sh",), losses=("plain", "tiled", "fused")),
    "torchtune": Format(
        files=("torchtune.sh",),
        strategies=("single", "fsdp", "hsdp"),
        precisions=("fp32", "bf16-pure"),
        offloads=("none", "all"),
        losses=("plain", "chunked"),
        attentions=("sdpa",),
        tasks=("causal-lm",),
        code="torch",
    ),
    "verl": Format(
        files=("verl.sh",),
        strategies=("fsdp",),
        precisions=("bf16",),
        offloads=("none", "all"),
        methods=("full", "full", "lora"),
        tasks=("causal-lm", "sft"),
    ),
    "openrlhf": Format(
        files=("openrlhf.sh",),
        strategies=("zero1", "zero2", "zero3"),
        precisions=("bf16", "fp16"),
        optimizers=("adamw-fused",),
        offloads=("none", "optimizer"),
        methods=("full", "full", "lora"),
        tasks=("causal-lm", "sft", "dpo", "reward"),
    ),
    "nemo-rl": Format(
        files=("nemo_rl.yaml",),
        strategies=("fsdp",),
        precisions=("fp32", "bf16"),
        optimizers=("adamw", "adamw-fused", "adamw-forloop"),
        offloads=("none", "all"),
        methods=("full", "full", "lora"),
        losses=("plain",),
        attentions=("sdpa",),
        degrees=("tp", "cp"),
        tasks=("causal-lm", "sft", "dpo", "reward"),
    ),
    "deepspeed": Format(
        files=("deepspeed.json",),
        fields=("strategy", "dp_shard", *BATCH, "precision", "optimizer", "offload", "gradient_compression"),
        strategies=("ddp", "zero1", "zero2", "zero3"),
        optimizers=("adamw", "adamw-fused", "adamw-forloop", "sgd", "adafactor", "lion"),
        offloads=(*("none",) * 3, "optimizer", "all", "nvme"),
        methods=("full",),
        losses=("plain",),
        has_model=False,
    ),
    "accelerate": Format(
        files=("accelerate.yaml",),
        fields=(*SPREAD, "precision", "offload"),
        precisions=("fp32", "bf16", "fp16"),
        methods=("full",),
        losses=("plain",),
        degrees=("tp", "cp"),
        has_model=False,
    ),
    "huggingface": Format(
        files=("training_arguments.json",),
        fields=(*SPREAD, *BATCH, "precision", "optimizer", "activation_checkpointing", "offload"),
        precisions=("fp32", "bf16", "fp16"),
        optimizers=("adamw", "adamw-fused", "adamw-8bit", "adamw-8bit-paged", "adamw-4bit", "sgd", "adafactor", "lion"),
        methods=("full",),
        losses=("plain",),
        has_model=False,
    ),
    "torchtitan": Format(
        files=("torchtitan.toml",),
        strategies=("single", "ddp", "fsdp", "fsdp-grad-op", "hsdp"),
        precisions=("fp32", "bf16", "bf16-pure"),
        optimizers=("adamw", "adamw-fused", "adamw-forloop"),
        checkpointings=("none", "selective", "full"),
        offloads=("none", "all"),
        methods=("full",),
        losses=("plain", "chunked"),
        attentions=("sdpa",),
        degrees=("tp", "pp", "cp"),
        splits_sequence=(True,),
        tasks=("causal-lm",),
        code="torchtitan",
        models=("llama-3-8b", "llama-3.2-1b", "qwen3-8b"),
    ),
    "megatron": Format(
        files=("megatron.sh",),
        strategies=("single", "ddp", "zero1"),
        precisions=("fp32", "bf16", "fp16"),
        optimizers=("adamw-fused", "sgd"),
        checkpointings=("none", "selective", "full"),
        offloads=("none",),
        methods=("full",),
        losses=("plain",),
        degrees=("tp", "pp", "cp"),
        splits_sequence=(False, True),
        tasks=("causal-lm",),
        code="megatron",
    ),
    "nanotron": Format(
        files=("nanotron.sh",),
        strategies=("single", "ddp", "zero1"),
        precisions=("bf16",),
        optimizers=("adamw", "adamw-fused"),
        offloads=("none",),
        methods=("full",),
        losses=("plain",),
        attentions=("flash",),
        degrees=("tp", "pp", "cp"),
        splits_sequence=(False, True),
        tasks=("causal-lm",),
        code="nanotron",
        models=("llama-3-8b", "llama-2-7b"),
    ),
}


@draw.composite
def plans(pick: draw.DrawFn, format: Format) -> Plan:
    """A plan out of a format's words, on up to 32 GPUs."""
    strategy = pick(draw.sampled_from(format.strategies))
    nodes = 2 if strategy == "hsdp" else pick(draw.sampled_from((1, 1, 2)))
    per_node = 1 if strategy == "single" else pick(draw.sampled_from((2, 4, 8)))
    nodes = 1 if strategy == "single" else nodes
    degrees = dict.fromkeys(words.DEGREES, 1)
    for name in format.degrees:
        degrees[name] = pick(draw.sampled_from((1, 1, 2)))
    ranks, sharing = nodes * per_node, degrees["tp"] * degrees["pp"] * degrees["cp"]
    assume(ranks % sharing == 0)
    data = ranks // sharing
    split = (
        {"dp_replicate": data, "dp_shard": 1} if strategy in words.REPLICAS else {"dp_replicate": 1, "dp_shard": data}
    )
    if strategy == "hsdp":
        assume(data >= nodes and data % nodes == 0)
        split = {"dp_replicate": nodes, "dp_shard": data // nodes}
    assume(strategy != "fsdp-grad-op" or degrees["pp"] == 1)  # in a pipeline torchtitan's two forms are one
    method = pick(draw.sampled_from(format.methods))
    workload: dict[str, Any] = {
        "task": pick(draw.sampled_from(format.tasks)),
        "method": method,
        "loss": pick(draw.sampled_from(format.losses)),
        "code": format.code,
        "compile": pick(draw.booleans()),
    }
    if method != "full":
        workload |= {"lora_rank": pick(draw.sampled_from((8, 16, 64)))}
        workload |= {"lora_targets": pick(draw.sampled_from(("all-linear", "attention", "q_proj,v_proj")))}
    optimizer, offload = pick(draw.sampled_from(format.optimizers)), pick(draw.sampled_from(format.offloads))
    if offload != "none" and strategy.startswith("zero") and optimizer.startswith("adamw-f"):
        optimizer = "adamw"  # DeepSpeedCPUAdam, which has no variants
    return make_plan(
        strategy,
        gpus=ranks,
        nodes=nodes,
        model=catalogue_model(pick(draw.sampled_from(format.models))),
        workload=workload,
        **split,
        **degrees,
        micro_batch_size=pick(draw.sampled_from((1, 2, 4))),
        gradient_accumulation_steps=pick(draw.sampled_from((1, 3, 8))),
        sequence_length=pick(draw.sampled_from((512, 2048, 4096))),
        precision=pick(draw.sampled_from(format.precisions)),
        optimizer=optimizer,
        sequence_parallel=degrees["tp"] > 1 and pick(draw.sampled_from(format.splits_sequence)),
        attention=pick(draw.sampled_from(format.attentions)),
        activation_checkpointing=pick(draw.sampled_from(format.checkpointings)),
        offload=offload,
    )


def ask(reading: Reading, plan: Plan) -> tuple[Request, Configuration]:
    """Return what a reading asks for on the plan's cards; what it does not say is the plan's."""
    answers = {name: value for name, value in reading.answers.items() if value is not None}
    gpus = answers.get("gpus", plan.cluster["gpus"])
    work = {name: answers[name] for name in Question.__dataclass_fields__ if name in answers and name != "nodes"}
    work.pop("model", None)
    if work.get("task") == "causal-lm":
        work.pop("task")
    code = answers.get("code", TRAINERS[reading.format].code)
    nodes = answers.get("nodes", plan.cluster["nodes"])
    question = Question(**work | {"gpus": gpus, "nodes": nodes, "gpu": "h100", "code": code})
    request = question.request(model_of(reading, plan), allow_unrunnable=True)
    return exact(request, exact_options(answers, request.cluster.gpus))


def model_of(reading: Reading, plan: Plan) -> ModelFacts:
    if "model_config" in reading.answers:
        return facts_from_config(reading.answers["model_config"], "read")
    return named_model(str(reading.answers["model"])) if "model" in reading.answers else find_model(plan.model["name"])


def read_back(plan: Plan, format: str) -> Reading:
    """Return what the emitted files are read as; a format that has no form of the plan ends the example."""
    try:
        files = emit(plan, format)
    except ContradictoryRequest:
        assume(False)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        named = [Path(folder) / name for name in FORMATS[format].files if name in files]
        assume(named)  # torchtitan's TOML is of release 0.2.2, which not every plan has a form in
        return read_files(named)


def check_round_trip(plan: Plan, name: str) -> None:
    format = FORMATS[name]
    reading = read_back(plan, name)
    request, configuration = ask(reading, plan)
    expected, got = plan.configuration, configuration
    assert {field: getattr(got, field) for field in format.fields} == {
        field: getattr(expected, field) for field in format.fields
    }
    if not format.has_model:
        return
    facts = find_model(plan.model["name"])
    if format.code == "transformers":
        assert request.facts.name == facts.name
    else:  # by its sizes, or a flavor's name; Megatron pads vocabularies
        assert request.facts.parameters == pytest.approx(facts.parameters, rel=0.01)
    method = plan.workload.get("method", "full")
    assert request.workload.method == method
    if method != "full":
        wanted = {key: plan.workload[key] for key in ("method", "lora_rank", "lora_targets", "task")}
        own = Question(**wanted, gpus=1, gpu="h100").request(facts)
        assert request.counts.trained.total == own.counts.trained.total
    assert not [finding for finding in reading.findings if finding.severity == "error"]


QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sweep(every=2)
def test_a_plan_is_read_as_it_was_emitted(name: str) -> None:
    @QUICK
    @given(plan=plans(FORMATS[name]))
    def check(plan: Plan) -> None:
        check_round_trip(plan, name)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_plans_are_read_as_they_were_emitted(name: str) -> None:
    @MANY
    @given(plan=plans(FORMATS[name]))
    def check(plan: Plan) -> None:
        check_round_trip(plan, name)

    check()


ROUNDS = {
    "trl": ("trl.sh", {"strategy": "zero2", "loss": "tiled"}),
    "verl": ("verl.sh", {"strategy": "fsdp", "loss": "plain"}),
    "openrlhf": ("openrlhf.sh", {"strategy": "zero3", "loss": "plain"}),
    "nemo-rl": ("nemo_rl.yaml", {"strategy": "fsdp", "loss": "plain"}),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_of_generation_are_read_as_they_were_emitted(name: str, tmp_path: Path) -> None:
    script, rollout = ROUNDS[name]
    asked_for = {"generations": 8, "prompt_len": 512, "completion_len": "512:1024", "beta": 0.04, "rollout_sleep": True}
    plan = estimate(
        model="llama-3-8b", gpu="h100", gpus=8, task="grpo", rollout="colocate", micro_batch=2, grad_accum=4,
        optimizer="adamw-fused", checkpointing="full", **asked_for, **rollout,
    )  # fmt: skip
    for file, text in emit(plan, name).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    answers = read_files([tmp_path / script]).answers
    round_of = plan.workload
    expected = {
        "task": "grpo",
        "strategy": rollout["strategy"],
        "micro_batch": 2,
        "optimizer": "adamw-fused",
        "checkpointing": "full",
        "generations": 8,
        "completion_len": "1024",
        "beta": 0.04,
        "rollout": "colocate",
        "rollout_tp": round_of["rollout_tp"],
        "rollout_memory": round_of["rollout_memory"],
        "rollout_sleep": True,
    }
    if name == "trl":  # which has no key for the prompt's length, and says rounds in micro-batches
        expected |= {"steps_per_generation": 4, "grad_accum": 4}
    else:
        expected |= {"prompt_len": 512, "prompts_per_step": round_of["prompts_per_step"], "global_batch": 64}
    assert {field: answers.get(field) for field in expected} == expected
