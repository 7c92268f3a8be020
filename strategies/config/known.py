"""Every key a config may have, by section, and the engines that read it.

The names and defaults are those of DeepSpeed 0.19's documentation and parser, plus a few sections of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from strategies.config.values import (
    CheckpointSection,
    CommunicationSection,
    DataSection,
    Fp16Section,
    LogSection,
    LoraSection,
    MonitorSettings,
    PipelineSection,
    ProfilerSection,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of one section."""

    read: frozenset[str] = frozenset()
    """Every engine follows them."""
    own: frozenset[str] = frozenset()
    """The same, and DeepSpeed does not have them."""
    hints: frozenset[str] = frozenset()
    """They steer how DeepSpeed works, not what it computes, and other engines need not care."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Only DeepSpeed follows them, so that other engines accept nothing but the default."""
    switched: frozenset[str] = frozenset()
    """Sections of DeepSpeed alone with keys of their own, which do nothing unless `enabled`."""
    opaque: frozenset[str] = frozenset()
    """Sections with any keys."""
    sections: Mapping[str, Keys] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All keys, sorted."""
        groups = (self.read, self.own, self.hints, self.defaults, self.switched, self.opaque, self.sections)
        return tuple(sorted(name for group in groups for name in group))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _fields(section: type[Any]) -> frozenset[str]:
    return frozenset(each.name for each in fields(section))


_BY_NAME = Keys(read=_words("type"), opaque=_words("params"), hints=_words("legacy_fusion"))

_FP16 = Keys(
    read=_words("enabled") | _fields(Fp16Section),
    # Every other engine casts floating-point inputs to the precision of the plan anyway.
    hints=_words("auto_cast"),
    defaults={"consecutive_hysteresis": False, "fp16_master_weights_and_grads": False},
)

_BF16 = Keys(
    read=_words("enabled bf16_master_weights_and_grads bf16_optimizer_states"),
    hints=_words("immediate_grad_update check_grad_overflow check_overflow auto_cast"),
)

_OFFLOAD_OPTIMIZER = Keys(
    read=_words("device nvme_path pin_memory buffer_count ratio"),
    hints=_words("pipeline pipeline_read pipeline_write fast_init cpuadam_cores_perc buffer_size"),
    defaults={"super_offload": False},
)

_OFFLOAD_PARAM = Keys(
    read=_words("device nvme_path pin_memory"),
    hints=_words("buffer_count buffer_size max_in_cpu"),
)

_ZERO = Keys(
    read=_words("stage reduce_bucket_size stage3_param_persistence_threshold"),
    # DeepSpeed had these until 0.18: its own ZeRO shards over all ranks, ours over as many as they say.
    own=_words("mics_shard_size mics_hierarchical_params_gather"),
    hints=_words(
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size"
        " overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size"
        " stage3_prefetch_bucket_size stage3_model_persistence_threshold stage3_max_live_parameters"
        " stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"
        " stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"
        " legacy_stage1 round_robin_gradients parameter_alignment memory_efficient_linear"
        " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks"
        " save_muon_momentum_buffer_in_memory leaf_module"
    ),
    defaults={
        "ignore_unused_parameters": True,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "zenflow": None,
    },
    sections={"offload_optimizer": _OFFLOAD_OPTIMIZER, "offload_param": _OFFLOAD_PARAM},
)

_ACTIVATIONS = Keys(
    read=_words("cpu_checkpointing"),
    own=_words("enabled policy"),
    # They divide or lay out what tensor parallelism would repeat on every rank.
    hints=_words(
        "partition_activations contiguous_memory_optimization number_checkpoints"
        " synchronize_checkpoint_boundary profile"
    ),
)

_LOG = Keys(read=_fields(LogSection))

_CHECKPOINT = Keys(
    own=_fields(CheckpointSection),
    hints=_words("tag_validation load_universal parallel_write writer checkpoint_serialization"),
    defaults={"use_node_local_storage": False},
)

_COMPILE = (
    "autoep_non_moe free_activation free_activation_threshold offload_activation offload_activation_pin_memory"
    " offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce"
    " sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
)

TOP = Keys(
    read=_words(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
        " communication_data_type wall_clock_breakdown memory_breakdown steps_per_print"
    ),
    hints=_words(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather sparse_gradients log_level"
        " dataloader_drop_last seq_parallel_communication_data_type use_data_before_expert_parallelism"
        " checkpoint_tag_validation elastic_checkpoint vocabulary_size dump_state"
    ),
    own=_words("train_only kernels"),
    opaque=_words("timers aio"),
    defaults={
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "managed_gradient_accumulation": True,
        "disable_python_gc": False,
        "graph_harvesting": False,
        "sequence_parallel_size": 1,
        "sparse_attention": None,
        "compression_training": None,
        "weight_quantization": None,
        "expert_parallel": None,
    },
    switched=_words(
        "amp autotuning comet comms_logger curriculum_learning data_efficiency eigenvalue elasticity"
        " flops_profiler hybrid_engine nebula progressive_layer_drop quantize_training torch_autocast wandb"
    ),
    sections={
        "optimizer": _BY_NAME,
        "scheduler": _BY_NAME,
        "fp16": _FP16,
        "bf16": _BF16,
        "zero_optimization": _ZERO,
        "data_types": Keys(
            read=_words("grad_accum_dtype"),
            defaults={"param_dtype": None, "buffer_dtype": None, "keep_in_fp32_modules": "auto"},
        ),
        "activation_checkpointing": _ACTIVATIONS,
        "tensorboard": _LOG,
        "csv_monitor": _LOG,
        "checkpoint": _CHECKPOINT,
        "lora": Keys(own=_fields(LoraSection)),
        "dataloader": Keys(own=_fields(DataSection)),
        "communication": Keys(own=_words("data_type compression error_feedback block_size bucket_cap_mb")),
        "monitor": Keys(own=_fields(MonitorSettings)),
        "profiler": Keys(own=_fields(ProfilerSection)),
        "pipeline": Keys(
            read=_fields(PipelineSection),
            hints=_words("seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned"),
        ),
        "tensor_parallel": Keys(
            defaults={"autotp_size": 0, "tp_size": 1},
            opaque=_words("tp_grain_size tp injection_policy_tuple keep_module_on_host replace_with_kernel_inject"),
        ),
        "compile": Keys(defaults={"deepcompile": False}, opaque=_words(_COMPILE)),
    },
)


# The part of a config that DeepSpeed gets: keys it knows, without those that dsplan handles itself.
_OURS_EVERYWHERE = ("scheduler", "tensorboard", "csv_monitor", "wall_clock_breakdown", "memory_breakdown")
"""Schedulers, metrics files and timers are made here under every strategy, so that they are the same under each."""


def for_deepspeed(values: Mapping[str, Any], communication: CommunicationSection) -> dict[str, Any]:
    """Return the config in DeepSpeed's words, where `auto` and `null` are left out as if they were not there."""
    theirs = {name: value for name, value in _without_own(values, TOP).items() if name not in _OURS_EVERYWHERE}
    dtype = communication.compression if communication.compression in ("fp16", "bf16") else communication.data_type
    return theirs if dtype is None else {**theirs, "communication_data_type": dtype}


def _without_own(values: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in keys.own or value is None or value == "auto":
            continue
        section = keys.sections.get(key)
        if section is None or not isinstance(value, Mapping):
            kept[key] = value
        elif inner := _without_own(value, section):
            kept[key] = inner
    return kept
