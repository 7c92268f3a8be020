"""Plan -> Megatron-Core's sizes and degrees, as arguments of Megatron-LM and as Python of Megatron-Bridge and NeMo 2.

One mapping of Megatron-Core's field names serves all three. Source of the names: NVIDIA/Megatron-LM at d98e8a64
(megatron/training/arguments.py, megatron/core/transformer/transformer_config.py), NVIDIA-NeMo/Megatron-Bridge at
067f987d (src/megatron/bridge/training/config.py, models/gpt_provider.py), NVIDIA/NeMo at 8cfedd72
(nemo/collections/llm/gpt/model/base.py, nemo/lightning/pytorch/strategies/megatron_strategy.py).
"""

from __future__ import annotations

import json

from planner.cost.code_bases import code_base
from planner.emit.common import (
    DEFAULTS,
    Abilities,
    EmitOptions,
    facts_of,
    node_layout,
    refuse,
    require,
    script_duties,
)
from planner.emit.launchers import launch_script
from planner.models.facts import ModelFacts
from planner.types.plan import Plan
from planner.vocabulary import DEFAULT_RECOMPUTED

_CODE = code_base("megatron")
_ABILITIES = Abilities(
    strategies=frozenset({"single", "ddp", "zero1", "fsdp", "hsdp"}),
    instead="Megatron shards the optimizer (zero1) or everything (fsdp, hsdp); plan one of these",
    precisions=frozenset({"fp32", "bf16", "fp16", "fp8", "fp4"}),
    optimizers=frozenset({"adamw", "adamw-fused", "adamw-forloop", "sgd", "lion", "muon"}),
    compressions=frozenset({"none", "bf16"}),
    schedules=frozenset(_CODE.schedules),
    offloads=frozenset(_CODE.offloads),
    checkpointings=frozenset(_CODE.checkpointings),
)
_OPTIMIZERS = {"sgd": "sgd", "lion": "lion", "muon": "muon"}
_FP8_RECIPES = {"tensorwise": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
_BACKENDS = {"flash": "flash", "eager": "unfused"}

Fields = dict[str, object]
"""Values by Megatron-Core's own field names."""


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`megatron.sh`, around `pretrain_gpt.py` of a checkout that MEGATRON names.

    Raises:
        ContradictoryRequest: Megatron-LM has no form of this plan.
    """
    form = "Megatron-LM arguments"
    lines = arguments(plan, options, form)
    call = "megatron.sh --train-iters N --data-path ... --tokenizer-type ..."
    # Megatron-LM asserts one connection for tensor and context parallelism before Blackwell, and several for its FSDP.
    connections = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if _one_connection(plan) else ""
    head = f'{connections}: "${{MEGATRON:?set MEGATRON to a checkout of Megatron-LM}}"\n'
    command = ' \\\n    "$MEGATRON/pretrain_gpt.py" \\\n    ' + " \\\n    ".join(lines)
    duties = script_duties(plan, "megatron", options)
    return {"megatron.sh": launch_script(plan, call, duties, head=head, arguments=command)}


def arguments(plan: Plan, options: EmitOptions, form: str = "Megatron-LM arguments") -> list[str]:
    """Megatron-LM's arguments, one option with its values per item.

    Raises:
        ContradictoryRequest: Megatron-LM has no form of this plan.
    """
    require(plan, form, _ABILITIES)
    configuration = plan.configuration
    model = model_fields(plan, form)
    vocabulary = _pad(facts_of(plan, form).vocab_size, configuration.tp)
    fields: Fields = {
        **model,
        "max_position_embeddings": model.get("max_position_embeddings", configuration.sequence_length),
        "padded_vocab_size": vocabulary,
        **parallel_fields(plan, form),
        **_recompute(plan),
        **_precision(plan, form),
        **_attention(plan),
        **_fused_loss(plan),
        "micro_batch_size": configuration.micro_batch_size,
        "global_batch_size": configuration.global_batch_size,
        "optimizer": _OPTIMIZERS.get(configuration.optimizer, "adam"),
        "lr": options.learning_rate,
        "weight_decay": options.weight_decay,
        "clip_grad": options.gradient_clipping,
    }
    if configuration.gradient_compression == "bf16":
        fields["grad_reduce_in_bf16"] = True
    rendered = (_argument(name, value) for name, value in fields.items())
    return ["--use-mcore-models", *filter(None, rendered)]


_WHEN_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
"""Switches that Megatron has on; every other one is off until its argument is there."""
_ARGUMENTS = {
    "num_moe_experts": "--num-experts",
    "gated_linear_unit": "--swiglu",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "num_query_groups": "--group-query-attention --num-query-groups",
}
"""Names of arguments that are not the field's with dashes."""


def _argument(name: str, value: object) -> str:
    flag = _ARGUMENTS.get(name, "--" + name.replace("_", "-"))
    if isinstance(value, bool):
        return (flag if value else "") if name not in _WHEN_OFF else "" if value else _WHEN_OFF[name]
    if name == "moe_layer_freq" and isinstance(value, list):
        # Megatron-LM evaluates the text; runs of like layers keep it short.
        dense = value.index(1)
        return f'{flag} "([0]*{dense}+[1]*{len(value) - dense})"'
    if name == "pipeline_model_parallel_layout":
        return f'{flag} "{value}"'
    separator = "," if isinstance(value, tuple) else " "
    return f"{flag} {separator.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def _one_connection(plan: Plan) -> bool:
    configuration = plan.configuration
    return configuration.strategy not in ("fsdp", "hsdp") and configuration.tp * configuration.cp > 1


def _pad(vocabulary: int, tp: int) -> int:
    """Return the smallest vocabulary that tp ranks share evenly; Megatron's own default pads to multiples of 128 tp."""
    return -(-vocabulary // tp) * tp


# The model, by Megatron-Core's names.


def model_fields(plan: Plan, form: str) -> Fields:
    """Return the sizes of the plan's model.

    Raises:
        ContradictoryRequest: Megatron's GPT has another structure than the model, or as many weights by no setting.
    """
    facts = facts_of(plan, form)
    lack = _find_lack_of_gpt(facts)
    if lack:
        raise refuse(plan, form, f"of {facts.name}, which has {lack},", "emit it as accelerate or torchrun")
    biased = facts.mlp_bias and facts.attn_out_bias and facts.qkv_bias
    fields: Fields = {
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "ffn_hidden_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "seq_length": plan.configuration.sequence_length,
        "vocab_size": facts.vocab_size,
        "normalization": "RMSNorm" if facts.norm == "rmsnorm" else "LayerNorm",
        "gated_linear_unit": facts.gated_mlp,
        "add_bias_linear": biased,
        "add_qkv_bias": facts.qkv_bias and not biased,
        "qk_layernorm": bool(facts.qk_norm) or facts.mla is not None,
        "share_embeddings_and_output_weights": facts.tie_word_embeddings,
        "position_embedding_type": "learned_absolute" if facts.learned_positions else "rope",
        "hidden_dropout": facts.hidden_dropout,
        "attention_dropout": facts.attention_dropout,
    }
    if facts.learned_positions:
        fields["max_position_embeddings"] = facts.max_position_embeddings
    else:
        fields |= {"rotary_base": facts.rotary_base} if facts.rotary_base else {}
        fields |= {"rotary_percent": facts.rotary_pct} if facts.rotary_pct != 1.0 else {}
    if 0 < facts.sliding_window < plan.configuration.sequence_length:
        # transformers counts a token among those that it sees, Megatron only those before it.
        fields["window_size"] = (facts.sliding_window - 1, 0)
    fields |= _mla(facts) if facts.mla else _heads(facts)
    fields |= _experts(facts) if facts.num_experts else {}
    if _weights(facts, biased) != facts.parameters:
        raise refuse(plan, form, f"of {facts.name}, whose weights are others", "emit it as accelerate or torchrun")
    return fields


def _weights(facts: ModelFacts, biased: bool) -> int:
    """Return the weights of Megatron's GPT of these sizes: its embedding, attention, MLPs and norms, summed."""
    hidden, heads, norm = facts.hidden_size, facts.num_heads, 1 if facts.norm == "rmsnorm" else 2
    gates = 3 if facts.gated_mlp else 2
    if facts.mla is not None:
        mla, query = facts.mla, heads * (facts.mla.qk_nope_head_dim + facts.mla.qk_rope_head_dim)
        attention = mla.q_lora_rank * (hidden + query + norm) if mla.q_lora_rank else hidden * query
        attention += mla.kv_lora_rank * (hidden + heads * (mla.qk_nope_head_dim + mla.v_head_dim) + norm)
        attention += hidden * mla.qk_rope_head_dim + heads * mla.v_head_dim * hidden
    else:
        queries, keys = heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        attention = 2 * hidden * (queries + keys) + (2 * facts.head_dim * norm if facts.qk_norm else 0)
        attention += (queries + 2 * keys if facts.qkv_bias else 0) + (hidden if biased else 0)
    dense = gates * hidden * facts.intermediate_size + ((gates - 1) * facts.intermediate_size + hidden) * biased
    sparse = 0
    if facts.num_experts:
        routed, shared = _expert_widths(facts)
        sparse = gates * hidden * (facts.num_experts * routed + shared) + hidden * (
            facts.num_experts + facts.shared_expert_gate
        )
    plain = facts.first_k_dense if facts.num_experts else facts.num_layers
    blocks = facts.num_layers * (attention + 2 * hidden * norm) + plain * dense + (facts.num_layers - plain) * sparse
    tables = facts.vocab_size * (1 if facts.tie_word_embeddings else 2)
    tables += facts.max_position_embeddings if facts.learned_positions else 0
    return blocks + hidden * (tables + norm)


def _find_lack_of_gpt(facts: ModelFacts) -> str | None:
    """Return what of a model Megatron's GPT does not have; None where it has all."""
    lacks = {
        "a parallel residual": facts.parallel_residual,
        f"{facts.position_type} positions": facts.position_type not in ("rope", "learned"),
        "an offset in its positions": bool(facts.position_offset),
        f"{facts.activation} activations": not _known_activation(facts),
        f"{facts.norms_per_layer} norms per layer": facts.norms_per_layer != 2 or facts.post_norm,
        "norms of whole queries and keys": facts.qk_norm not in (False, True),
        "soft caps": bool(facts.attn_logit_softcapping or facts.final_logit_softcapping),
        "attention sinks": facts.attention_sinks,
        "sliding windows in some layers": bool(facts.sliding_window_pattern),
        "a norm after its embedding": facts.embedding_layernorm,
        "an embedding of another width": facts.word_embed_proj_dim not in (0, facts.hidden_size),
        "biases in experts": facts.expert_bias or facts.router_bias,
        "a bias in its head": facts.lm_head_bias,
        "biases in some products": facts.mlp_bias != facts.attn_out_bias,
    }
    return next((what for what, there in lacks.items() if there), None)


def _known_activation(facts: ModelFacts) -> bool:
    return facts.activation == "silu" if facts.gated_mlp else facts.activation.startswith("gelu")


def _heads(facts: ModelFacts) -> Fields:
    fields: Fields = {"kv_channels": facts.head_dim}
    if facts.num_kv_heads != facts.num_heads:
        fields["num_query_groups"] = facts.num_kv_heads
    return fields


def _mla(facts: ModelFacts) -> Fields:
    assert facts.mla is not None
    ranks: Fields = {"q_lora_rank": facts.mla.q_lora_rank} if facts.mla.q_lora_rank else {}
    return {
        "multi_latent_attention": True,
        **ranks,
        "kv_lora_rank": facts.mla.kv_lora_rank,
        "qk_head_dim": facts.mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": facts.mla.qk_rope_head_dim,
        "v_head_dim": facts.mla.v_head_dim,
    }


def _expert_widths(facts: ModelFacts) -> tuple[int, int]:
    """Return the feed-forward widths of one routed expert, and of all shared ones together."""
    width = facts.moe_intermediate_size or facts.intermediate_size
    return width, facts.shared_expert_intermediate_size or facts.num_shared_experts * width


def _experts(facts: ModelFacts) -> Fields:
    width, shared = _expert_widths(facts)
    fields: Fields = {
        "num_moe_experts": facts.num_experts,
        "moe_router_topk": facts.experts_per_token,
        "moe_ffn_hidden_size": width,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    if shared:
        fields["moe_shared_expert_intermediate_size"] = shared
        fields["moe_shared_expert_gate"] = facts.shared_expert_gate
    if facts.first_k_dense:
        fields["moe_layer_freq"] = [0] * facts.first_k_dense + [1] * (facts.num_layers - facts.first_k_dense)
    return fields


# The degrees, precision and recomputation, by the same names.


def parallel_fields(plan: Plan, form: str) -> Fields:
    """Return the degrees and what shards; what is 1 or off is left to Megatron's default.

    Raises:
        ContradictoryRequest: Megatron cannot combine them.
    """
    configuration, facts = plan.configuration, facts_of(plan, form)
    fields: Fields = {
        "tensor_model_parallel_size": configuration.tp,
        "pipeline_model_parallel_size": configuration.pp,
        "context_parallel_size": configuration.cp,
        "sequence_parallel": configuration.sequence_parallel and configuration.tp > 1,
    }
    if facts.num_experts:
        fields["expert_model_parallel_size"] = configuration.ep
        if configuration.ep > 1:
            fields["expert_tensor_parallel_size"] = 1
        if configuration.tp > 1 and not configuration.sequence_parallel:
            raise refuse(plan, form, "of experts under tp alone", "Megatron needs --sequence-parallel beside it")
    elif configuration.ep > 1:
        raise refuse(plan, form, f"with ep {configuration.ep}", f"{facts.name} has no experts; plan with --ep 1")
    return {**fields, **_stages(plan, form, facts.num_layers), **_sharding(plan, form)}


def _stages(plan: Plan, form: str, layers: int) -> Fields:
    """Return how layers are cut into stages: as named, evenly, embedding and head counted as layers, or by the ends.

    A layout names the embedding, every layer and the loss, and says how many stages a rank has, which no other argument
    may beside it (NVIDIA/Megatron-LM@d98e8a64 megatron/core/transformer/pipeline_parallel_layer_layout.py;
    megatron/training/arguments.py line 931).
    """
    configuration = plan.configuration
    pp, virtual = configuration.pp, configuration.virtual_stages
    if pp == 1:
        return {}
    fields: Fields = {"virtual_pipeline_model_parallel_size": virtual} if virtual > 1 else {}
    if virtual > 1 and configuration.gradient_accumulation_steps % pp:
        steps = configuration.gradient_accumulation_steps
        raise refuse(plan, form, f"with {steps} micro-batches", f"interleaving needs a multiple of pp {pp}")
    if configuration.stage_layers:
        stages = "|".join(f"t*{count}" for count in configuration.stage_layers)
        return {"pipeline_model_parallel_layout": f"E{stages}L"}
    if layers % (pp * virtual) == 0:
        return fields
    if (layers + 2) % (pp * virtual) == 0:
        return {**fields, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    middle = -(-layers // pp)
    left = layers - middle * (pp - 2)
    if virtual > 1 or left < 2:
        stages = f"{pp * virtual} stages"
        raise refuse(plan, form, f"of {layers} layers", f"they do not split into {stages}; plan with another --pp")
    return {
        "num_layers_in_first_pipeline_stage": left - left // 2,
        "num_layers_in_last_pipeline_stage": left // 2,
    }


def _sharding(plan: Plan, form: str) -> Fields:
    configuration = plan.configuration
    if configuration.strategy in ("single", "ddp"):
        return {}
    overlap: Fields = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    copies: Fields = {}
    if configuration.dp_replicate > 1:
        copies["num_distributed_optimizer_instances"] = configuration.dp_replicate
    if configuration.strategy == "zero1":
        return {**overlap, **copies}
    if configuration.pp > 1:
        reason = f"with pp {configuration.pp}"
        raise refuse(plan, form, reason, "Megatron-FSDP is for plans without stages; plan zero1")
    sharding: Fields = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    return {**overlap, **copies, **sharding, "ckpt_format": "fsdp_dtensor"}


def _precision(plan: Plan, form: str) -> Fields:
    precision = plan.configuration.precision
    if precision in ("bf16", "fp16"):
        return {precision: True}
    if precision == "fp4":
        return {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"}
    if precision == "fp8":
        recipe = plan.workload.get("fp8_recipe") or "tensorwise"
        if recipe not in _FP8_RECIPES:
            choices = " or ".join(_FP8_RECIPES)
            raise refuse(plan, form, f"with fp8 recipe {recipe}", f"plan with --fp8-recipe {choices}")
        return {"bf16": True, "fp8": "hybrid", "fp8_recipe": _FP8_RECIPES[recipe]}
    return {}


def _recompute(plan: Plan) -> Fields:
    """Full recomputation of every K-th block becomes that of the first of a stage's blocks, as many as that is."""
    configuration = plan.configuration
    if configuration.activation_checkpointing == "none":
        return {}
    if configuration.activation_checkpointing == "selective":
        modules = list(configuration.recomputed or DEFAULT_RECOMPUTED)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    fields: Fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if configuration.checkpoint_every > 1:
        layers = plan.model.get("num_layers", 1)
        in_chunk = -(-layers // (configuration.pp * configuration.virtual_stages))
        fields |= {"recompute_method": "block", "recompute_num_layers": -(-in_chunk // configuration.checkpoint_every)}
    return fields


def _fused_loss(plan: Plan) -> Fields:
    """Megatron's fusion still makes logits; Transformer Engine's is refused by Megatron-LM as unstable."""
    if plan.workload.get("loss") != "fused":
        return {}
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}


def _attention(plan: Plan) -> Fields:
    backend = _BACKENDS.get(plan.configuration.attention)
    return {"attention_backend": backend} if backend else {}


# Megatron-Bridge and NeMo 2: the same fields as keyword arguments of a Python file that torchrun starts.

_DDP = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "use_megatron_fsdp")
_DDP_FIELDS = (*_DDP, "data_parallel_sharding_strategy", "num_distributed_optimizer_instances")
_BACKEND = "from megatron.core.transformer.enums import AttnBackend\n"
_BRIDGE = """{head}
import torch
from megatron.bridge.models.{provider_module} import {provider}
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain
{backend}
TRAIN_ITERS = 100

MODEL = {provider}(
{model})
CONFIG = ConfigContainer(
    model=MODEL,
    train=TrainingConfig(
        micro_batch_size={micro},
        global_batch_size={batch},
        train_iters=TRAIN_ITERS,
    ),
    optimizer=OptimizerConfig(
{optimizer}    ),
    scheduler=SchedulerConfig(lr_decay_style="constant", lr_decay_iters=TRAIN_ITERS),
    ddp=DistributedDataParallelConfig(
{ddp}    ),
    # Random tokens: put GPTDatasetConfig(data_path=..., seq_length={sequence}) here, and the tokenizer of the data.
    dataset=MockGPTDatasetConfig(
        seq_length={sequence},
        random_seed=1234,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    ),
    tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size={vocabulary}),
    logger=LoggerConfig(log_interval=1),
    checkpoint=CheckpointConfig({checkpoint}),
    dist=DistributedInitConfig(),
    mixed_precision={precision},
)

if __name__ == "__main__":
    pretrain(config=CONFIG, forward_step_func=forward_step)
"""


def emit_bridge(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`bridge_plan.py`, a ConfigContainer and a call of Megatron-Bridge's `pretrain`, and `torchrun.sh` to start it.

    Raises:
        ContradictoryRequest: Megatron-Bridge has no form of this plan.
    """
    form = "a Megatron-Bridge config"
    fields, ddp = _python_fields(plan, form)
    configuration, mla = plan.configuration, "multi_latent_attention" in fields
    text = _BRIDGE.format(
        head=_docstring(plan, "Megatron-Bridge", "bridge_plan.py"),
        provider="MLAModelProvider" if mla else "GPTModelProvider",
        provider_module="mla_provider" if mla else "gpt_provider",
        model=_keywords(fields, 4),
        backend=_BACKEND if "attention_backend" in fields else "",
        micro=configuration.micro_batch_size,
        batch=configuration.global_batch_size,
        sequence=configuration.sequence_length,
        vocabulary=fields["vocab_size"],
        optimizer=_keywords(_optimizer(plan, options), 8),
        ddp=_keywords({"grad_reduce_in_fp32": configuration.gradient_compression != "bf16", **ddp}, 8),
        checkpoint='ckpt_format="fsdp_dtensor"' if "use_megatron_fsdp" in ddp else "",
        precision=_call("MixedPrecisionConfig", _mixed(plan, form)) if configuration.precision != "fp32" else "None",
    )
    return {"bridge_plan.py": text, "torchrun.sh": _started(plan, options, "megatron-bridge", "bridge_plan.py")}


def emit_nemo(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`nemo_plan.py`, a model, a strategy and a call of NeMo 2's `llm.pretrain`, and `torchrun.sh` to start it.

    Raises:
        ContradictoryRequest: NeMo 2 has no form of this plan.
    """
    form = "a NeMo 2 recipe"
    configuration = plan.configuration
    require(plan, form, _ABILITIES)
    if facts_of(plan, form).mla is not None:
        raise refuse(plan, form, "of latent attention", "emit it as megatron-bridge or megatron")
    fields, ddp = _python_fields(plan, form)
    split = {name: fields.pop(name) for name in _STRATEGY_FIELDS if name in fields}
    split |= {name: ddp[name] for name in ("num_distributed_optimizer_instances",) if name in ddp}
    fsdp = {"fsdp": "megatron", "save_ckpt_format": "fsdp_dtensor"} if "use_megatron_fsdp" in ddp else {}
    word = {"fp32": "32", "fp16": "16-mixed"}.get(configuration.precision, "bf16-mixed")
    nodes, per_node = node_layout(plan)
    mixed = {name: value for name, value in _mixed(plan, form).items() if name not in ("bf16", "fp16")}
    text = _NEMO.format(
        head=_docstring(plan, "NeMo 2", "nemo_plan.py"),
        model=_keywords(fields, 4),
        backend=_BACKEND if "attention_backend" in fields else "",
        micro=configuration.micro_batch_size,
        batch=configuration.global_batch_size,
        sequence=configuration.sequence_length,
        strategy=_keywords({**split, **fsdp}, 8),
        ddp=_keywords({"grad_reduce_in_fp32": configuration.gradient_compression != "bf16", **ddp}, 12),
        optimizer=_keywords(_optimizer(plan, options), 8),
        precision=_call("nl.MegatronMixedPrecision", {"precision": word, **mixed}),
        devices=per_node,
        nodes=nodes,
    )
    return {"nemo_plan.py": text, "torchrun.sh": _started(plan, options, "nemo", "nemo_plan.py")}


_STRATEGY_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "sequence_parallel", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
    "pipeline_dtype",
)
"""Fields that NeMo 2 takes in its strategy and sets in the model itself."""
_NEMO = """{head}
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
{backend}from nemo import lightning as nl
from nemo.collections import llm

MODEL = llm.GPTConfig(
{model})
DATA = llm.MockDataModule(  # random tokens: put llm.PreTrainingDataModule(paths=..., ...) of these sizes here
    seq_length={sequence},
    micro_batch_size={micro},
    global_batch_size={batch},
)
TRAINER = nl.Trainer(
    accelerator="gpu",
    devices={devices},
    num_nodes={nodes},
    max_steps=100,
    strategy=nl.MegatronStrategy(
{strategy}        ddp=DistributedDataParallelConfig(
{ddp}        ),
    ),
    plugins={precision},
    use_distributed_sampler=False,
)
OPTIMIZER = nl.MegatronOptimizerModule(
    config=OptimizerConfig(
{optimizer}    )
)

if __name__ == "__main__":
    llm.pretrain(model=llm.GPTModel(MODEL), data=DATA, trainer=TRAINER, optim=OPTIMIZER)
"""


def _python_fields(plan: Plan, form: str) -> tuple[Fields, Fields]:
    """Keyword arguments of the model, and of the data-parallel wrapper."""
    require(plan, form, _ABILITIES)
    everything = {**model_fields(plan, form), **parallel_fields(plan, form), **_recompute(plan), **_fused_loss(plan)}
    everything |= _attention(plan)
    for name in ("ckpt_format", "max_position_embeddings"):  # a setting of checkpoints; the sequence's length there
        everything.pop(name, None)
    ddp = {name: everything.pop(name) for name in _DDP_FIELDS if name in everything}
    tp = plan.configuration.tp
    # Megatron-Core pads to multiples of this times tp.
    everything["make_vocab_size_divisible_by"] = 1
    everything["vocab_size"] = _pad(facts_of(plan, form).vocab_size, tp)
    if plan.configuration.pp > 1:
        everything["pipeline_dtype"] = _Name("torch." + _DTYPES.get(plan.configuration.precision, "bfloat16"))
    return everything, ddp


class _Name(str):
    """A name in Python rather than a text."""


_DTYPES = {"fp32": "float32", "fp16": "float16"}


def _optimizer(plan: Plan, options: EmitOptions) -> Fields:
    configuration = plan.configuration
    return {
        "optimizer": _OPTIMIZERS.get(configuration.optimizer, "adam"),
        "lr": options.learning_rate,
        "weight_decay": options.weight_decay,
        "clip_grad": options.gradient_clipping,
        "bf16": configuration.precision in ("bf16", "fp8", "fp4"),
        "fp16": configuration.precision == "fp16",
        "use_distributed_optimizer": configuration.strategy not in ("single", "ddp"),
    }


def _mixed(plan: Plan, form: str) -> Fields:
    """Fields of the precision, with the type of parameters and of what stages send."""
    dtype = _Name("torch." + _DTYPES.get(plan.configuration.precision, "bfloat16"))
    reduced = {"grad_reduce_in_fp32": plan.configuration.gradient_compression != "bf16"}
    return {**_precision(plan, form), "params_dtype": dtype, "pipeline_dtype": dtype, **reduced}


def _keywords(fields: Fields, indent: int) -> str:
    lines = []
    for name, value in fields.items():
        if name == "attention_backend":
            value = _Name(f"AttnBackend.{value}")
        lines.append(f"{name}={_literal(value)}")
        if name == "gated_linear_unit" and value is True:
            lines.append("activation_func=torch.nn.functional.silu")
    return "".join(f"{' ' * indent}{line},\n" for line in lines)


def _call(function: str, fields: Fields) -> str:
    return f"{function}(\n{_keywords(fields, 8)}    )"


def _literal(value: object) -> str:
    if isinstance(value, list) and 0 in value:
        dense = value.index(1)
        return f"[0] * {dense} + [1] * {len(value) - dense}"
    if isinstance(value, list):
        return json.dumps(value)
    return f'"{value}"' if isinstance(value, str) and not isinstance(value, _Name) else str(value)


def _docstring(plan: Plan, tool: str, name: str) -> str:
    configuration = plan.configuration
    return f'''"""{configuration.strategy} on {configuration.world_size} ranks for {tool}: bash torchrun.sh {name}"""
'''


def _started(plan: Plan, options: EmitOptions, format: str, name: str) -> str:
    head = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if _one_connection(plan) else ""
    return launch_script(plan, f"torchrun.sh {name}", script_duties(plan, format, options), head=head)
