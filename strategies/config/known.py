"""Every key a config may have, by section, and who reads it.

The names and defaults are those of DeepSpeed 0.19's documentation and parser, plus a few sections of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strategies.config.values import CommunicationSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The keys of one section.

    `read`: every engine does what they say. `own`: the same, and DeepSpeed does not know them. `hints`: they steer how
    DeepSpeed works, not what it computes, and other engines need not care. `defaults`: only DeepSpeed does what they
    say, so that other engines accept nothing but the default. `switched`: sections of DeepSpeed alone with keys of
    their own, which do nothing unless `enabled`. `opaque`: sections with any keys.
    """

    read: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    hints: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    switched: frozenset[str] = frozenset()
    opaque: frozenset[str] = frozenset()
    sections: Mapping[str, Known] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All keys, sorted."""
        groups = (self.read, self.own, self.hints, self.defaults, self.switched, self.opaque, self.sections)
        return tuple(sorted(name for group in groups for name in group))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BY_NAME = Known(read=_words("type"), opaque=_words("params"), hints=_words("legacy_fusion"))

_FP16 = Known(
    read=_words("enabled loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    # Every other engine casts floating-point inputs to the precision of the plan anyway.
    hints=_words("auto_cast"),
    defaults={"consecutive_hysteresis": False, "fp16_master_weights_and_grads": False},
)

_BF16 = Known(
    read=_words("enabled bf16_master_weights_and_grads bf16_optimizer_states"),
    hints=_words("immediate_grad_update check_grad_overflow check_overflow auto_cast"),
)

_OFFLOAD_OPTIMIZER = Known(
    read=_words("device nvme_path pin_memory buffer_count ratio"),
    hints=_words("pipeline pipeline_read pipeline_write fast_init cpuadam_cores_perc buffer_size"),
    defaults={"super_offload": False},
)

_OFFLOAD_PARAM = Known(
    read=_words("device nvme_path pin_memory"),
    hints=_words("buffer_count buffer_size max_in_cpu"),
)

_ZERO = Known(
    read=_words("stage reduce_bucket_size stage3_param_persistence_threshold"),
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
        "mics_shard_size": -1,
        "mics_hierarchical_params_gather": False,
    },
    sections={"offload_optimizer": _OFFLOAD_OPTIMIZER, "offload_param": _OFFLOAD_PARAM},
)

_ACTIVATIONS = Known(
    read=_words("cpu_checkpointing"),
    own=_words("enabled policy"),
    # They divide or lay out what tensor parallelism would repeat on every rank.
    hints=_words(
        "partition_activations contiguous_memory_optimization number_checkpoints"
        " synchronize_checkpoint_boundary profile"
    ),
)

_LOG = Known(read=_words("enabled output_path job_name"))

_CHECKPOINT = Known(
    own=_words("directory keep_last asynchronous every_steps trainable_only"),
    hints=_words("tag_validation load_universal parallel_write writer checkpoint_serialization"),
    defaults={"use_node_local_storage": False},
)

_COMPILE = (
    "autoep_non_moe free_activation free_activation_threshold offload_activation offload_activation_pin_memory"
    " offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce"
    " sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
)

TOP = Known(
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
        "data_types": Known(
            read=_words("grad_accum_dtype"),
            defaults={"param_dtype": None, "buffer_dtype": None, "keep_in_fp32_modules": "auto"},
        ),
        "activation_checkpointing": _ACTIVATIONS,
        "tensorboard": _LOG,
        "csv_monitor": _LOG,
        "checkpoint": _CHECKPOINT,
        "lora": Known(own=_words("method rank alpha targets dropout")),
        "dataloader": Known(own=_words("num_workers pin_memory bad_samples seed")),
        "communication": Known(own=_words("data_type compression error_feedback block_size bucket_cap_mb")),
        "monitor": Known(
            own=_words(
                "enabled output_path sample_seconds loss_spike slowdown memory_growth gpu cpu network thresholds"
            )
        ),
        "profiler": Known(own=_words("enabled wait warmup active output_path")),
        "pipeline": Known(
            read=_words("stages partition"),
            hints=_words("seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned"),
        ),
        "tensor_parallel": Known(
            defaults={"autotp_size": 0, "tp_size": 1},
            opaque=_words("tp_grain_size tp injection_policy_tuple keep_module_on_host replace_with_kernel_inject"),
        ),
        "compile": Known(defaults={"deepcompile": False}, opaque=_words(_COMPILE)),
    },
)


# The part of a config that DeepSpeed gets: keys it knows, without those that dsplan handles itself.


_OURS_EVERYWHERE = ("scheduler", "tensorboard", "csv_monitor", "wall_clock_breakdown", "memory_breakdown")
"""Schedulers, metrics files and timers are made here under every strategy, so that they are the same under each."""


def for_deepspeed(values: Mapping[str, Any], communication: CommunicationSection) -> dict[str, Any]:
    """The config in DeepSpeed's words, where `auto` and `null` are left out as if they were not there."""
    known = _known(values, TOP)
    for name in _OURS_EVERYWHERE:
        known.pop(name, None)
    dtype = communication.compression if communication.compression in ("fp16", "bf16") else communication.data_type
    return known if dtype is None else {**known, "communication_data_type": dtype}


def _known(values: Mapping[str, Any], known: Known) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in known.own or value is None or value == "auto":
            continue
        section = known.sections.get(key)
        if section is None or not isinstance(value, Mapping):
            kept[key] = value
        elif inner := _known(value, section):
            kept[key] = inner
    return kept
