"""Plan -> torchtitan: the TOML of release 0.2.2, the Python of those after it, and a script that starts either.

Source of the names: pytorch/torchtitan at v0.2.2 (73a0e697: torchtitan/config/job_config.py, models/*/__init__.py,
distributed/pipeline_parallel.py) and at b5bcd76c (config/configs.py, config/README.md, models/*/__init__.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

from hardware_db.records import dataclass
from planner.cost.code_bases import code_base
from planner.emit.common import (
    DEFAULTS,
    Abilities,
    EmitOptions,
    every_block,
    facts_of,
    model_number,
    refuse,
    require,
    script_duties,
)
from planner.emit.launchers import launch_script
from planner.types.plan import Plan

_FORM = "a torchtitan config"
_CODE = code_base("torchtitan")
_ABILITIES = Abilities(
    strategies=frozenset({"single", "ddp", "fsdp", "fsdp-grad-op", "hsdp"}),
    instead="torchtitan shards with FSDP2; plan fsdp or hsdp",
    precisions=frozenset({"fp32", "bf16", "bf16-pure", "fp8", "fp4"}),
    optimizers=frozenset({"adamw", "adamw-fused", "adamw-forloop"}),
    attentions=frozenset({"sdpa", "flash"}),
    schedules=frozenset(_CODE.schedules),
    offloads=frozenset(_CODE.offloads),
    checkpointings=frozenset(_CODE.checkpointings),
)
_IMPLEMENTATIONS = {"adamw": "foreach", "adamw-fused": "fused", "adamw-forloop": "for-loop"}
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}


@dataclass(frozen=True, slots=True)
class _Flavor:
    """A registered model: its module, its name there, and whether release 0.2.2 has it."""

    module: str
    name: str
    in_release: bool = True


_FLAVORS = {
    ("llama", 1_235_814_400): _Flavor("llama3", "1B", in_release=False),
    ("llama", 3_212_749_824): _Flavor("llama3", "3B", in_release=False),
    ("llama", 8_030_261_248): _Flavor("llama3", "8B"),
    ("llama", 70_553_706_496): _Flavor("llama3", "70B"),
    ("llama", 405_853_388_800): _Flavor("llama3", "405B"),
    ("qwen3", 596_049_920): _Flavor("qwen3", "0.6B"),
    ("qwen3", 1_720_574_976): _Flavor("qwen3", "1.7B"),
    ("qwen3", 4_022_468_096): _Flavor("qwen3", "4B"),
    ("qwen3", 8_190_735_360): _Flavor("qwen3", "8B"),
    ("qwen3", 14_768_307_200): _Flavor("qwen3", "14B"),
    ("qwen3", 32_762_123_264): _Flavor("qwen3", "32B"),
    ("qwen3_moe", 30_532_122_624): _Flavor("qwen3", "30B-A3B"),
    ("qwen3_moe", 235_093_634_560): _Flavor("qwen3", "235B-A22B"),
    ("deepseek_v2", 15_706_484_224): _Flavor("deepseek_v3", "16B"),
    ("deepseek_v2", 235_741_434_880): _Flavor("deepseek_v3", "236B"),
    ("deepseek_v3", 671_026_404_352): _Flavor("deepseek_v3", "671B"),
    ("gpt_oss", 20_914_757_184): _Flavor("gpt_oss", "20b"),
    ("gpt_oss", 116_829_156_672): _Flavor("gpt_oss", "120b"),
}
"""Registered models by their type and their weights, counted over the modules that b5bcd76c builds."""

Section = dict[str, object]


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`torchtitan.toml` and `torchtitan_plan.py`, or the one of them that has the plan, and `torchtitan.sh`.

    Raises:
        ContradictoryRequest: torchtitan has no form of this plan, or registers no model of these sizes.
    """
    flavor = _check(plan)
    lacks_toml, lacks_python = _find_lack_of_toml(plan, flavor), _find_lack_of_python(plan)
    if lacks_toml and lacks_python:
        raise refuse(plan, _FORM, f"with {lacks_toml}", "plan with --precision bf16, or --fp8-recipe rowwise")
    files = {} if lacks_toml else {"torchtitan.toml": _toml(toml_sections(plan, flavor, options))}
    if not lacks_python:
        files["torchtitan_plan.py"] = _python(plan, flavor, options)
    duties = script_duties(plan, "torchtitan", options)
    head = _CHOICE if len(files) == 2 else "\n"
    chosen = "" if len(files) == 2 else " " + (_BY_PYTHON if lacks_toml else _BY_TOML)
    command = " -m torchtitan.train" + chosen
    call = "torchtitan.sh --training.steps N"
    return files | {"torchtitan.sh": launch_script(plan, call, duties, head=head, arguments=command)}


_BY_TOML = "--job.config_file torchtitan.toml"
_BY_PYTHON = "--module torchtitan_plan --config plan"
_CHOICE = f"""
# torchtitan 0.2.2 reads the TOML; later ones take the Python file, with TITAN_CONFIG=python.
if [ "${{TITAN_CONFIG:-toml}}" = python ]; then
    export PYTHONPATH="$PWD:${{PYTHONPATH:-}}"
    set -- {_BY_PYTHON} "$@"
else
    set -- {_BY_TOML} "$@"
fi
"""


# What torchtitan has of a plan.


def _check(plan: Plan) -> _Flavor:
    """Return the registered model of the plan's sizes.

    Raises:
        ContradictoryRequest: torchtitan lacks something of the plan.
    """
    require(plan, _FORM, _ABILITIES)
    configuration, facts = plan.configuration, facts_of(plan, _FORM)
    if configuration.strategy == "ddp" and configuration.splits_model:
        raise refuse(plan, _FORM, "beside other degrees", "torchtitan combines DDP with nothing; plan fsdp")
    _require_stages(plan, facts.num_layers)
    flavor = _FLAVORS.get((facts.model_type, facts.parameters))
    if flavor is None:
        alike = ", ".join(registered.name for key, registered in _FLAVORS.items() if key[0] == facts.model_type)
        names = alike or "llama3, qwen3, deepseek_v3 and gpt_oss"
        raise refuse(plan, _FORM, f"of {facts.name}", f"it registers {names}; emit it as megatron or accelerate")
    return flavor


def _require_stages(plan: Plan, layers: int) -> None:
    configuration = plan.configuration
    pp, virtual = configuration.pp, configuration.virtual_stages
    if pp == 1:
        return
    looped = configuration.pp_schedule in ("interleaved", "zero-bubble")
    if looped != (virtual > 1):
        schedule = f"with schedule {configuration.pp_schedule} and {virtual} stages per rank"
        raise refuse(plan, _FORM, schedule, f"torch's takes {'two or more' if looped else 'one'}; --virtual-stages")
    if configuration.stage_layers:
        return
    if virtual > 2 and -(-layers // -(-layers // (pp * virtual))) != pp * virtual:
        raise refuse(plan, _FORM, f"of {layers} layers in {pp * virtual} stages", "plan with fewer --virtual-stages")


def _find_lack_of_toml(plan: Plan, flavor: _Flavor) -> str | None:
    """Return what release 0.2.2 does not have of a plan; None where it has all."""
    recipe, configuration = _recipe(plan), plan.configuration
    if not flavor.in_release:
        return f"{flavor.module} {flavor.name}"
    if configuration.strategy == "hsdp" and configuration.dp_shard * configuration.cp == 1:
        # parallelize_llama: neither dp_shard nor cp makes it DDP, which it does not combine with tp or pp.
        return "hsdp over one shard"
    return recipe if recipe not in ("", "tensorwise", "rowwise", "mxfp8") or configuration.precision == "fp4" else None


def _find_lack_of_python(plan: Plan) -> str | None:
    """Return what torchtitan after 0.2.2 does not have of a plan; None where it has all."""
    recipe, configuration = _recipe(plan), plan.configuration
    if configuration.activation_checkpointing == "full" and configuration.checkpoint_every > 1:
        return every_block(plan)
    return recipe if recipe not in ("", "rowwise", "mxfp8", "nvfp4") else None


def _recipe(plan: Plan) -> str:
    precision = plan.configuration.precision
    if precision not in ("fp8", "fp4"):
        return ""
    return plan.workload.get("fp8_recipe") or ("nvfp4" if precision == "fp4" else "rowwise")


# Sections that both forms share.


def _named_stages(layers: Sequence[int], head: str) -> list[list[str]]:
    """Return the names of the modules of each stage, the output layer being called `head`."""
    stages = [
        [f"layers.{index}" for index in range(end - count, end)]
        for count, end in zip(layers, accumulate(layers), strict=True)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", head]
    return stages


def _degrees(plan: Plan, head: str) -> Section:
    """Return the degrees; releases after 0.2.2 call the output layer by another name (`head`)."""
    configuration = plan.configuration
    reshards = configuration.strategy != "fsdp-grad-op" and configuration.pp == 1
    section: Section = {
        "data_parallel_replicate_degree": configuration.dp_replicate,
        "data_parallel_shard_degree": configuration.dp_shard,
        # In a pipeline what the default does, and the plan counts.
        "fsdp_reshard_after_forward": "always" if reshards else "never",
        "tensor_parallel_degree": configuration.tp,
        "context_parallel_degree": configuration.cp,
        "expert_parallel_degree": configuration.ep,
        "pipeline_parallel_degree": configuration.pp,
    }
    if configuration.pp == 1:
        return section
    # Stages of as many layers as the plan counts; by default torchtitan takes one from the first and one from the last.
    section |= {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
    section["pipeline_parallel_schedule"] = _SCHEDULES[configuration.pp_schedule]
    if configuration.stage_layers:
        section["module_fqns_per_model_part"] = _named_stages(configuration.stage_layers, head)
    elif configuration.virtual_stages > 2:
        layers = model_number(plan, "num_layers")
        section["pipeline_parallel_layers_per_stage"] = -(-layers // (configuration.pp * configuration.virtual_stages))
    return section


def _training(plan: Plan, options: EmitOptions) -> Section:
    configuration = plan.configuration
    return {
        "max_norm": options.gradient_clipping,
        "enable_cpu_offload": configuration.offload == "all",
        "dtype": "bfloat16" if configuration.precision == "bf16-pure" else "float32",
        "mixed_precision_param": "float32" if configuration.precision == "fp32" else "bfloat16",
    }


def toml_sections(plan: Plan, flavor: _Flavor, options: EmitOptions = DEFAULTS) -> dict[str, Section]:
    """Return the tables of `torchtitan.toml`, by their dotted names."""
    configuration, recipe = plan.configuration, _recipe(plan)
    micro, steps = configuration.micro_batch_size, configuration.gradient_accumulation_steps
    parallelism = _degrees(plan, "output")
    if configuration.pp > 1:
        parallelism["pipeline_parallel_microbatch_size"] = micro
    if configuration.ep > 1:
        parallelism["expert_tensor_parallel_degree"] = 1
    elif configuration.tp > 1:
        parallelism["expert_tensor_parallel_degree"] = configuration.tp
    converters = {"": [], "mxfp8": ["mx"]}.get(recipe, ["float8"])
    sections: dict[str, Section] = {
        "model": {
            "name": flavor.module,
            "flavor": flavor.name,
            "hf_assets_path": f"./assets/hf/{str(plan.model.get('name', 'model')).rsplit('/', 1)[-1]}",
            "converters": converters,
        },
        "optimizer": {
            "name": "AdamW",
            "lr": options.learning_rate,
            "weight_decay": options.weight_decay,
            "implementation": _IMPLEMENTATIONS[configuration.optimizer],
        },
        "training": {
            # Under a pipeline the samples of a rank's whole step, cut into micro-batches by the schedule.
            "local_batch_size": micro * steps if configuration.pp > 1 else micro,
            "global_batch_size": configuration.global_batch_size,
            "seq_len": configuration.sequence_length,
            **_training(plan, options),
            "dataset": "c4",
        },
        "parallelism": parallelism,
        "activation_checkpoint": _toml_checkpointing(plan),
        "compile": {"enable": bool(plan.workload.get("compile"))},
    }
    if recipe == "mxfp8":
        sections["quantize.linear.mx"] = {"recipe_name": "mxfp8_cublas"}
    elif recipe:
        whole = recipe == "tensorwise"
        sections["quantize.linear.float8"] = {
            "recipe_name": recipe,
            "enable_fsdp_float8_all_gather": whole,
            "precompute_float8_dynamic_scale_for_fsdp": whole,
            "filter_fqns": ["output"],
        }
    return sections


def _toml_checkpointing(plan: Plan) -> Section:
    configuration = plan.configuration
    if configuration.activation_checkpointing == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    if configuration.activation_checkpointing == "full" and configuration.checkpoint_every > 1:
        return {"mode": "selective", "selective_ac_option": str(configuration.checkpoint_every)}
    return {"mode": configuration.activation_checkpointing}


def _toml(sections: dict[str, Section]) -> str:
    """Tables of words, numbers, switches and lists, which TOML writes as JSON does."""
    lines = ["# torchtitan 0.2.2: steps, data and the tokenizer's folder are yours to set."]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


# The Python configuration of torchtitan after 0.2.2.

_PYTHON = """{head}
from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import {losses}
from torchtitan.components.optimizer import default_adamw
{quantization}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
{policies}from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{module} import model_registry
from torchtitan.trainer import Trainer


def plan() -> Trainer.Config:
    converters = {converters}
    model_spec = model_registry("{flavor}", converters=converters)
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))
    optimizer = default_adamw(lr={lr}, weight_decay={decay})
    optimizer.implementation = "{implementation}"
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="{assets}",
        loss={loss},
        optimizer=optimizer,
        training=TrainingConfig(
{training}        ),
        parallelism=ParallelismConfig(
{parallelism}        ),
        activation_checkpoint={checkpointing},
        compile=CompileConfig(enable={compile}),
        dataloader=GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"])),
    )
"""
_CONVERTERS = {
    "": "None",
    "rowwise": '[Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled={})]',
    "mxfp8": "[MXFP8LinearConverter.Config(model_compile_enabled={})]",
    "nvfp4": '[NVFP4LinearConverter.Config(fqns=["layers"], model_compile_enabled={})]',
}


def _python(plan: Plan, flavor: _Flavor, options: EmitOptions) -> str:
    configuration = plan.configuration
    compiled = bool(plan.workload.get("compile"))
    parallelism = _degrees(plan, "lm_head")
    if configuration.tp > 1:
        parallelism["enable_sequence_parallel"] = configuration.sequence_parallel
    if configuration.pp > 1:
        parallelism["num_pp_microbatches"] = configuration.gradient_accumulation_steps
    training: Section = {
        "num_tokens_per_microbatch_per_dp_rank": configuration.micro_batch_size * configuration.sequence_length,
        "num_tokens_per_train_step": configuration.global_batch_size * configuration.sequence_length,
        "max_context_length": configuration.sequence_length,
        **_training(plan, options),
    }
    if configuration.pp > 1 or configuration.ep > 1:
        training["disable_cuda_graphs"] = True
    name = str(plan.model.get("name", "model")).rsplit("/", 1)[-1]
    chunked = plan.workload.get("loss", "plain") != "plain"
    policy = _POLICIES[configuration.activation_checkpointing]
    converters = _CONVERTERS[_recipe(plan)].format(compiled)
    return _PYTHON.format(
        head=f'"""{configuration.strategy} on {configuration.world_size} ranks, for torchtitan after 0.2.2."""\n',
        module=flavor.module,
        flavor=flavor.name,
        losses="ChunkedLossWrapper, CrossEntropyLoss" if chunked else "CrossEntropyLoss",
        quantization=_import_line("components.quantization", converters),
        policies=_import_line("distributed.activation_checkpoint", policy),
        converters=converters,
        lr=options.learning_rate,
        decay=options.weight_decay,
        implementation=_IMPLEMENTATIONS[configuration.optimizer],
        assets=f"./assets/hf/{name}",
        loss="ChunkedLossWrapper.Config(loss_fn=loss)" if chunked else "loss",
        training=_keywords(training),
        parallelism=_keywords(parallelism),
        checkpointing=policy,
        compile=compiled,
    )


_POLICIES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}


def _import_line(module: str, expression: str) -> str:
    """Return the import of the class whose Config an expression makes; empty for None."""
    name = expression.removeprefix("[").split(".")[0]
    return "" if name == "None" else f"from torchtitan.{module} import {name}\n"


def _keywords(section: Section) -> str:
    lines = (f"{name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in section.items())
    return "".join(f"            {line},\n" for line in lines)
