"""The files for torchtitan, Megatron-LM, Megatron-Bridge, NeMo 2 and nanotron, against what they document.

`trainer_schemas.json` has the names and kinds that each takes, with the commit they were read at. With DSPLAN_TRAINERS
set to a folder of checkouts (torchtitan-0.2.2, torchtitan, Megatron-LM, Megatron-Bridge, NeMo, nanotron) the slow test
hands the files to the tools' own parsers as well.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsplan.cli.plans import write_plans
from planner.emit import FORMATS, EmitOptions, emit, fitting_formats, script_duties
from planner.emit.common import FINETUNERS, TRAINERS
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from tests.planner.emit.canaries import CANARIES
from tests.planner.emit.consumers import ask
from tests.planner.emit.plans import catalogue_model, make_plan

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "trainer_schemas.json").read_text())


def split_plan(model: str = "llama-3-70b", strategy: str = "zero1", **changes: Any) -> Plan:
    """64 GPUs of 8 nodes: dp 4 x tp 4 x pp 4 unless told otherwise, 16 micro-batches of one sample."""
    degrees = {"dp_shard": 4, "tp": 4, "pp": 4, "sequence_parallel": True, "micro_batch_size": 1}
    fields = {**degrees, "gradient_accumulation_steps": 16, **changes}
    gpus = fields["dp_shard"] * fields["tp"] * fields["pp"] * fields.get("cp", 1) * fields.get("dp_replicate", 1)
    return make_plan(strategy, gpus=gpus, nodes=max(1, gpus // 8), model=catalogue_model(model), **fields)


GRID = {
    "llama-3-8b fsdp tp8": split_plan("llama-3-8b", "fsdp", dp_shard=8, tp=8, pp=1),
    "llama-3-8b hsdp": split_plan("llama-3-8b", "hsdp", dp_replicate=2, dp_shard=8, tp=1, pp=1),
    "llama-3-8b cp": split_plan("llama-3-8b", "fsdp", cp=2, tp=2, pp=1, sequence_length=32768),
    "llama-3-8b pure": split_plan("llama-3-8b", "fsdp", precision="bf16-pure", pp=1),
    "llama-3-8b offload": split_plan("llama-3-8b", "fsdp", offload="all", tp=1, pp=1, attention="flash"),
    "llama-3-70b zero1": split_plan(activation_checkpointing="full"),
    "llama-3-70b copies": split_plan(dp_replicate=2, dp_shard=2),
    "llama-3-8b grad-op copies": split_plan("llama-3-8b", "fsdp-grad-op", dp_replicate=4, dp_shard=4, tp=1, pp=1),
    "llama-3-70b every 2nd": split_plan(activation_checkpointing="full", checkpoint_every=2),
    "llama-3-70b fsdp pp": split_plan(strategy="fsdp", activation_checkpointing="full", optimizer="adamw-fused"),
    "llama-3-70b interleaved": split_plan(pp_schedule="interleaved", virtual_stages=5),
    "llama-3-70b fsdp interleaved": split_plan(strategy="fsdp", pp_schedule="interleaved", virtual_stages=5),
    "llama-3-70b zero-bubble": split_plan(strategy="fsdp", pp_schedule="zero-bubble", virtual_stages=2),
    "llama-3-70b stages": split_plan(layers_per_stage="3x22,1x14"),
    "llama-3-70b fsdp stages": split_plan(strategy="fsdp", layers_per_stage="3x22,1x14"),
    "llama-3-70b gpipe": split_plan(strategy="ddp", pp_schedule="gpipe"),
    "llama-3.1-405b": split_plan("llama3.1-405b", dp_shard=8, tp=8, pp=16, sequence_length=8192),
    "qwen2.5-7b cp": split_plan("qwen2.5-7b", cp=2, tp=2, pp=1, sequence_length=32768),
    "qwen3-8b": split_plan("qwen3-8b", "fsdp", pp=1, activation_checkpointing="selective"),
    "mistral-7b window": split_plan("mistral-7b", tp=2, pp=1, sequence_length=8192, attention="flash"),
    "gpt2": split_plan("gpt2", "ddp", dp_shard=1, dp_replicate=8, tp=1, pp=1, sequence_length=1024),
    "mixtral ep": split_plan("mixtral-8x7b", dp_shard=32, tp=2, pp=1, ep=8),
    "deepseek-v3": split_plan("deepseek-v3", dp_shard=64, tp=1, pp=16, ep=64),
    "deepseek-v3 modules": split_plan(
        "deepseek-v3",
        dp_shard=64,
        tp=1,
        pp=16,
        ep=64,
        activation_checkpointing="selective",
        recompute_modules="moe_act,layernorm",
    ),
    "deepseek-v3 fsdp": split_plan("deepseek-v3", "fsdp", dp_shard=256, tp=1, pp=1, ep=64),
    "fp8": split_plan("llama-3-8b", pp=1, precision="fp8", workload={"fp8_recipe": "blockwise", "loss": "fused"}),
    "fp8 titan": split_plan(
        "llama-3-8b", "fsdp", pp=1, precision="fp8", workload={"fp8_recipe": "tensorwise", "compile": True}
    ),
    "fp4": split_plan("llama-3-8b", pp=1, precision="fp4"),
}


def test_recomputed_modules_are_in_megatrons_flags() -> None:
    written = emit(GRID["deepseek-v3 modules"], "megatron")
    assert any("--recompute-modules moe_act layernorm" in text for text in written.values())
    bridge = emit(GRID["deepseek-v3 modules"], "megatron-bridge")["bridge_plan.py"]
    assert 'recompute_modules=["moe_act", "layernorm"]' in bridge


def test_stages_of_unlike_numbers_of_layers_are_named() -> None:
    files = {name: emit(GRID["llama-3-70b stages"], name) for name in ("megatron", "megatron-bridge", "nemo")}
    layout = "Et*22|t*22|t*22|t*14L"
    assert megatron_words(files["megatron"])["--pipeline-model-parallel-layout"] == [layout]
    assert not any("first-pipeline" in word for word in megatron_words(files["megatron"]))
    assert all(f'"{layout}"' in "".join(texts.values()) for texts in files.values())
    titan = emit(GRID["llama-3-70b fsdp stages"], "torchtitan")
    line = next(text for text in titan["torchtitan.toml"].splitlines() if text.startswith("module_fqns_per_model_part"))
    parts = json.loads(line.partition(" = ")[2])
    assert [len(part) for part in parts] == [23, 22, 22, 16]
    assert [part for stage in parts for part in stage] == [
        "tok_embeddings", *(f"layers.{index}" for index in range(80)), "norm", "output",
    ]  # fmt: skip
    assert '"layers.79", "norm", "lm_head"]' in titan["torchtitan_plan.py"].replace("'", '"')


@pytest.mark.parametrize("format", ["nanotron", "accelerate", "huggingface", "deepspeed"])
def test_trainers_that_deal_stages_out_evenly_refuse_others(format: str) -> None:
    with pytest.raises(ContradictoryRequest, match="stages have 3x22,1x14 layers") as refusal:
        emit(GRID["llama-3-70b stages"], format)
    assert "\n" not in str(refusal.value)


def every_file(format: str) -> dict[str, tuple[Plan, dict[str, str]]]:
    files = {}
    for name, plan in {**GRID, **CANARIES}.items():
        with suppress(ContradictoryRequest):
            files[name] = plan, emit(plan, format)
    return files


def megatron_words(files: dict[str, str]) -> dict[str, list[str]]:
    """Arguments of Megatron-LM with their values."""
    text = files["megatron.sh"]
    text = text[text.index("--use-mcore-models") :].replace("\\\n", " ")
    by_format: dict[str, list[str]] = {}
    for word in shlex.split(text.removesuffix('"$@"\n')):
        if word.startswith("--"):
            by_format[word] = []
        else:
            by_format[list(by_format)[-1]].append(word)
    return by_format


KINDS = {"int": int, "float": float}


def test_megatron_takes_every_argument_with_its_kind() -> None:
    schema = SCHEMAS["megatron"]["arguments"]
    emitted = every_file("megatron")
    assert len(emitted) >= 16
    for case, (_, files) in emitted.items():
        for name, values in megatron_words(files).items():
            kind, choices = schema[name]
            assert (kind == "flag") == (not values), (case, name)
            for value in values:
                KINDS.get(kind, str)(value)
                assert not choices or value in choices, (case, name, value)


def test_megatron_has_the_plans_sizes_and_degrees() -> None:
    for plan, files in every_file("megatron").values():
        words, configuration = megatron_words(files), plan.configuration
        degrees = ("tensor-model", "pipeline-model", "context")
        sizes = [int(words[f"--{name}-parallel-size"][0]) for name in degrees]
        assert sizes == [configuration.tp, configuration.pp, configuration.cp]
        assert int(words["--global-batch-size"][0]) == configuration.global_batch_size
        assert int(words["--hidden-size"][0]) == plan.model["hidden_size"]
        assert int(words["--num-layers"][0]) == plan.model["num_layers"]
        assert ("--use-distributed-optimizer" in words) == (configuration.strategy not in ("single", "ddp"))
        assert ("--use-megatron-fsdp" in words) == (configuration.strategy in ("fsdp", "hsdp"))
        assert ("--sequence-parallel" in words) == (configuration.sequence_parallel and configuration.tp > 1)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("llama-3-70b interleaved", {"--num-virtual-stages-per-pipeline-rank": ["5"]}),
        ("llama-3-70b copies", {"--num-distributed-optimizer-instances": ["2"], "--use-distributed-optimizer": []}),
        ("llama-3.1-405b", {"--account-for-embedding-in-pipeline-split": [], "--padded-vocab-size": ["128256"]}),
        ("deepseek-v3", {"--decoder-first-pipeline-num-layers": ["3"], "--decoder-last-pipeline-num-layers": ["2"]}),
        ("deepseek-v3", {"--moe-layer-freq": ["([0]*3+[1]*58)"], "--multi-latent-attention": []}),
        ("deepseek-v3", {"--expert-model-parallel-size": ["64"], "--moe-shared-expert-intermediate-size": ["2048"]}),
        ("mistral-7b window", {"--window-size": ["4095,0"], "--attention-backend": ["flash"]}),
        ("gpt2", {"--position-embedding-type": ["learned_absolute"], "--padded-vocab-size": ["50257"]}),
        ("qwen2.5-7b cp", {"--add-qkv-bias": [], "--disable-bias-linear": [], "--context-parallel-size": ["2"]}),
        ("fp8", {"--fp8-format": ["hybrid"], "--fp8-recipe": ["blockwise"], "--cross-entropy-fusion-impl": ["native"]}),
        ("fp4", {"--fp4-format": ["e2m1"], "--bf16": []}),
        ("llama-3-70b every 2nd", {"--recompute-method": ["block"], "--recompute-num-layers": ["10"]}),
    ],
)
def test_megatron_is_told_what_a_plan_is_about(case: str, expected: dict[str, list[str]]) -> None:
    words = megatron_words(emit(GRID[case], "megatron"))
    assert {name: words[name] for name in expected} == expected


@pytest.mark.parametrize(("format", "name"), [("megatron-bridge", "bridge_plan.py"), ("nemo", "nemo_plan.py")])
def test_python_names_only_fields_that_there_are(format: str, name: str) -> None:
    schema = SCHEMAS[format]["classes"]
    emitted = every_file(format)
    assert len(emitted) >= 14
    for case, (plan, files) in emitted.items():
        calls = [node for node in ast.walk(ast.parse(files[name])) if isinstance(node, ast.Call)]
        named: dict[str, Any] = {}
        for call in calls:
            assert isinstance(call.func, ast.Name | ast.Attribute)
            function = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
            fields = {str(item.arg): item.value for item in call.keywords}
            assert set(fields) <= set(schema[function]), (case, function, set(fields) - set(schema[function]))
            named |= fields
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        degrees = plan.configuration
        assert [ast.literal_eval(named[size]) for size in sizes] == [degrees.tp, degrees.pp, degrees.cp]


def test_torchtitans_toml_has_the_fields_of_its_job_config() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    schema = SCHEMAS["torchtitan"]["sections"]
    emitted = [(plan, files) for plan, files in every_file("torchtitan").values() if "torchtitan.toml" in files]
    assert len(emitted) >= 11
    for plan, files in emitted:
        config = tomllib.loads(files["torchtitan.toml"])
        quantize = config.pop("quantize", {"linear": {}})["linear"]
        for section, values in {
            **config,
            **{f"quantize.linear.{name}": part for name, part in quantize.items()},
        }.items():
            for key, value in values.items():
                kinds = schema[section][key]
                assert type(value).__name__ in kinds or value in kinds, (section, key, value)
        assert config["model"]["flavor"] in SCHEMAS["torchtitan"]["flavors"][config["model"]["name"]]
        check_titan_degrees(plan, config["parallelism"])
        training, steps = config["training"], plan.configuration.gradient_accumulation_steps
        at_once = plan.configuration.micro_batch_size * (steps if plan.configuration.pp > 1 else 1)
        assert training["local_batch_size"] == at_once
        assert training["global_batch_size"] == plan.configuration.global_batch_size


def check_titan_degrees(plan: Plan, section: dict[str, Any]) -> None:
    configuration = plan.configuration
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel")
    sizes = [section[f"{name}_degree"] for name in (*names, "context_parallel", "expert_parallel")]
    degrees = [configuration.dp_replicate, configuration.dp_shard, configuration.tp, configuration.pp]
    assert sizes == [*degrees, configuration.cp, configuration.ep]


def test_torchtitans_release_combines_replicas_without_shards_with_cp_alone() -> None:
    degrees = {"nodes": 2, "gpus": 4, "dp_replicate": 2, "dp_shard": 1, "model": catalogue_model("llama-3-8b")}
    assert set(emit(make_plan("hsdp", **degrees, cp=2), "torchtitan")) == {
        "torchtitan.toml", "torchtitan_plan.py", "torchtitan.sh",
    }  # fmt: skip
    assert set(emit(make_plan("hsdp", **degrees, tp=2), "torchtitan")) == {"torchtitan_plan.py", "torchtitan.sh"}


def test_torchtitans_python_counts_tokens_for_the_whole_step() -> None:
    plan = GRID["llama-3-70b fsdp interleaved"]
    text = emit(plan, "torchtitan")["torchtitan_plan.py"]
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = {item.arg: item.value for call in calls for item in call.keywords}
    expected = {
        "num_tokens_per_microbatch_per_dp_rank": 2048,
        "num_tokens_per_train_step": 4 * 16 * 2048,
        "num_pp_microbatches": 16,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_layers_per_stage": 4,
        "disable_cuda_graphs": True,
    }
    assert {name: ast.literal_eval(named[name]) for name in expected} == expected
    check_titan_degrees(plan, {str(key): literal(value) for key, value in named.items()})


def literal(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def test_nanotrons_yaml_has_the_fields_of_its_config() -> None:
    schema = SCHEMAS["nanotron"]["classes"]
    emitted = every_file("nanotron")
    assert len(emitted) >= 5
    for plan, files in emitted.values():
        config = yaml.safe_load(files["nanotron.yaml"])
        assert set(config) <= set(schema["Config"])
        model = config["model"]["model_config"]
        family = "Qwen2Config" if model.get("is_qwen2_config") else "LlamaConfig"
        for name, section in (
            ("ParallelismArgs", config["parallelism"]),
            ("TokensArgs", config["tokens"]),
            ("OptimizerArgs", config["optimizer"]),
            ("AdamWOptimizerArgs", config["optimizer"]["optimizer_factory"]),
            ("LRSchedulerArgs", config["optimizer"]["learning_rate_scheduler"]),
            ("ModelArgs", config["model"]),
            (family, model),
        ):
            assert set(section) <= set(schema[name]), (name, set(section) - set(schema[name]))
        sizes, degrees = config["parallelism"], plan.configuration
        product = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["context_parallel_size"]
        assert product == degrees.world_size
        assert config["optimizer"]["zero_stage"] == degrees.zero_stage
        steps = config["tokens"]["batch_accumulation_per_replica"] * config["tokens"]["micro_batch_size"]
        assert steps * sizes["dp"] == degrees.global_batch_size


REFUSED = [
    ("torchtitan", split_plan(), "zero1 plan", "plan fsdp or hsdp"),
    ("torchtitan", split_plan("llama-2-7b", "fsdp"), "of meta-llama/Llama-2-7b-hf", "it registers 1B, 3B, 8B, 70B"),
    ("torchtitan", split_plan("opt-6.7b", "fsdp", pp=1), "of facebook/opt-6.7b", "llama3, qwen3, deepseek_v3"),
    ("torchtitan", split_plan(strategy="fsdp", precision="fp16"), "in fp16", "--precision bf16"),
    ("torchtitan", split_plan(strategy="fsdp", pp_schedule="zero-bubble"), "1 stages per rank", "--virtual-stages"),
    ("torchtitan", split_plan(strategy="ddp", dp_shard=1, dp_replicate=4), "beside other degrees", "plan fsdp"),
    ("torchtitan", split_plan("llama-3-8b", "fsdp", pp=1, attention="eager"), "attention eager", "flash or sdpa"),
    ("megatron", split_plan(strategy="zero3", pp=1), "zero3 plan", "(zero1) or everything (fsdp, hsdp)"),
    ("megatron", split_plan(strategy="fsdp"), "with pp 4", "plan zero1"),
    ("megatron", split_plan("opt-6.7b", pp=1), "an offset in its positions", "emit it as accelerate"),
    ("megatron", split_plan("gemma-2-9b", pp=1), "gelu_pytorch_tanh activations", "emit it as accelerate"),
    ("megatron", split_plan(offload="optimizer"), "with offload optimizer", "--offload none"),
    ("megatron", split_plan(gradient_compression="fp16"), "compression fp16", "bf16 or none"),
    ("megatron", split_plan("mixtral-8x7b", pp=1, sequence_parallel=False), "under tp alone", "--sequence-parallel"),
    ("megatron", split_plan(pp_schedule="zero-bubble"), "schedule zero-bubble", "1f1b or interleaved"),
    (
        "megatron",
        split_plan(pp_schedule="interleaved", virtual_stages=5, gradient_accumulation_steps=6),
        "6 micro",
        "4",
    ),
    ("megatron", split_plan("llama-3-8b", pp=1, ep=4), "with ep 4", "no experts"),
    ("megatron", split_plan(workload={"method": "lora", "lora_rank": 8}), "with method lora", "PEFT"),
    ("megatron", split_plan(workload={"ema": True}), "with --ema", "plan without --ema"),
    ("megatron", split_plan("t5-3b", pp=1), "of google-t5/t5-3b, no decoder,", "emit it as accelerate"),
    ("nanotron", split_plan("google/vit-base-patch16-224", pp=1), "no decoder", "emit it as accelerate"),
    ("nemo", split_plan("deepseek-v3", tp=1, pp=1, ep=4), "latent attention", "megatron-bridge"),
    ("nanotron", split_plan(strategy="fsdp"), "fsdp plan", "plan zero1 or ddp"),
    ("nanotron", split_plan("mixtral-8x7b", pp=1), "of the experts", "emit it as megatron"),
    ("nanotron", split_plan("llama-3-8b", tp=16, pp=1), "tp 16 over 8 key-value heads", "smaller --tp"),
    ("nanotron", split_plan(activation_checkpointing="selective"), "checkpointing selective", "full or none"),
]


@pytest.mark.parametrize(("format", "plan", "reason", "remedy"), REFUSED)
def test_what_a_trainer_lacks_is_refused_in_one_line(format: str, plan: Plan, reason: str, remedy: str) -> None:
    with pytest.raises(ContradictoryRequest) as caught:
        emit(plan, format)
    message = str(caught.value)
    assert "\n" not in message
    before, _, after = message.partition("; ")
    assert reason in before
    assert remedy in after


@pytest.mark.parametrize(
    ("code", "formats"),
    [("torchtitan", ("torchtitan",)), ("megatron", ("megatron", "megatron-bridge")), ("nanotron", ("nanotron",))],
)
def test_a_plan_for_a_trainers_code_is_written_for_that_trainer(code: str, formats: tuple[str, ...]) -> None:
    assert fitting_formats(make_plan("fsdp", workload={"code": code})) == formats


def test_trainers_formats_come_with_plans_that_dsplan_run_cannot_run() -> None:
    tuning = set(FINETUNERS)
    assert set(fitting_formats(make_plan("fsdp"))) == set(FORMATS) - set(TRAINERS) - tuning
    assert set(fitting_formats(split_plan())) == set(FORMATS) - tuning
    assert set(fitting_formats(replace(make_plan("fsdp", precision="fp8"), runnable=False))) == set(FORMATS) - tuning


def test_recommended_plans_are_written_for_their_trainer_or_for_the_others(tmp_path: Path) -> None:
    for_titan = {"code": "torchtitan"}
    sharded = split_plan("llama-3-8b", "fsdp", tp=1, pp=1, workload=for_titan)
    write_plans([sharded, make_plan("zero3", workload=for_titan)], tmp_path)
    written = {path.name for path in (tmp_path / "plan-1").iterdir()}
    assert written == {"torchtitan"}
    assert {"deepspeed", "torchrun"} <= {path.name for path in (tmp_path / "plan-2").iterdir()}


def test_a_plan_counted_for_other_modules_says_so() -> None:
    duty = "runs the modules of transformers; plan again with --code megatron for this trainer's own"
    assert duty in script_duties(split_plan(), "megatron", EmitOptions())
    assert duty not in script_duties(split_plan(workload={"code": "megatron"}), "megatron", EmitOptions())


@pytest.mark.parametrize(
    ("model", "format", "left"),
    [
        ("llama-3.1-8b", "megatron", "rope scaling"),
        ("llama-3-8b", "megatron", None),
        ("mixtral-8x7b", "nemo", None),
        ("llama-3.1-8b", "nanotron", "rope base and scaling"),
        ("llama-3-8b", "nanotron", "rope base"),
        ("llama-2-7b", "megatron", "rope base and scaling"),
        ("opt-6.7b", "megatron", None),
    ],
)
def test_rotary_positions_are_left_to_the_script_where_a_model_has_more_of_them(
    model: str, format: str, left: str | None
) -> None:
    duties = script_duties(split_plan(model), format, EmitOptions())
    ropes = [duty for duty in duties if "rope" in duty]
    assert ropes == ([] if left is None else [f"is given the model's {left}, which a plan does not hold"])


@pytest.mark.slow
@pytest.mark.skipif("DSPLAN_TRAINERS" not in os.environ, reason="needs checkouts of the trainers; set DSPLAN_TRAINERS")
@pytest.mark.parametrize("tool", ["torchtitan-0.2.2", "torchtitan", "megatron", "megatron-bridge", "nemo", "nanotron"])
def test_the_trainers_own_parsers_take_the_files(tool: str, tmp_path: Path) -> None:
    format = "torchtitan" if tool.startswith("torchtitan") else tool
    question, plans = [], []
    for plan, files in every_file(format).values():
        wanted = {"torchtitan-0.2.2": "torchtitan.toml", "torchtitan": "torchtitan_plan.py"}.get(tool)
        if wanted is not None and wanted not in files:
            continue
        # torchtitan's converters look for torchao and the GPU, Megatron-LM's fp4 for Transformer Engine.
        if plan.configuration.precision in {"torchtitan": ("fp8", "fp4"), "megatron": ("fp4",)}.get(tool, ()):
            continue
        question.append([tool, files, plan.configuration.world_size])
        plans.append(plan)
    answers = ask("trainers_parse.py", question, directory=tmp_path)
    assert len(answers) >= 5
    for plan, answer in zip(plans, answers, strict=True):
        check_answer(tool, plan, answer)


def check_answer(tool: str, plan: Plan, answer: dict[str, Any]) -> None:
    degrees = plan.configuration
    if "unknown" in answer:
        assert answer["unknown"] == []
        assert answer["checked"] >= 8
    elif tool == "megatron":
        assert answer["data_parallel_size"] == degrees.dims.data_parallel
        assert answer["global_batch_size"] == degrees.global_batch_size
        assert answer["expert_model_parallel_size"] == degrees.ep
    elif tool == "nanotron":
        assert answer["degrees"] == [degrees.dims.data_parallel, degrees.tp, degrees.pp, degrees.cp]
        assert answer["global_batch_size"] == degrees.global_batch_size
    else:
        expected = [degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp, degrees.pp]
        assert answer["degrees"] == expected
        assert answer.get("weights", plan.model["parameters"]) == plan.model["parameters"]
