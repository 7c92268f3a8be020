"""Keys of Megatron-Core's arguments that no estimate follows: what each leaves out, and those without effect."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FURTHER, _SEES = "a further model is not counted", "of models that see, the language model is counted"
_PACKED = "samples are counted at their full length"
_OTHER_ATTENTION = "attention of another kind is counted as full attention"
_FURTHER_RUN = "a further run of the same test is not counted"
GAPS: Mapping[str, str] = {
    "rampup_batch_size": "the global batch is counted at its full size",
    "use_torch_fsdp2": "FSDP2 of Megatron is counted as its distributed optimizer",
    "use_megatron_fsdp": "Megatron-FSDP is counted as its distributed optimizer",
    "use_custom_fsdp": "Megatron-FSDP is counted as its distributed optimizer",
    "data_parallel_sharding_strategy": "Megatron-FSDP is counted as its distributed optimizer",
    "optimizer_cpu_offload": "its optimizer in host memory is not counted",
    "optimizer_offload_fraction": "its optimizer in host memory is not counted",
    "cpu_offloading": "activations in host memory are not counted",
    "use_precision_aware_optimizer": "states narrower than fp32 are not counted",
    "main_grads_dtype": "gradients are counted in fp32",
    "main_params_dtype": "masters are counted in fp32",
    "exp_avg_dtype": "states narrower than fp32 are not counted",
    "exp_avg_sq_dtype": "states narrower than fp32 are not counted",
    "mtp_num_layers": "layers that predict further tokens are not counted",
    "moe_layer_freq": "every layer behind the first dense ones is counted as routed",
    "expert_tensor_parallel_size": "experts are counted whole on their ranks",
    "hybrid_layer_pattern": "layers of other kinds than attention are counted as attention",
    "hybrid_override_pattern": "layers of other kinds than attention are counted as attention",
    "pipeline_model_parallel_layout": "stages are counted as equal",
    "decoder_first_pipeline_num_layers": "stages are counted as equal",
    "decoder_last_pipeline_num_layers": "stages are counted as equal",
    "account_for_embedding_in_pipeline_split": "stages are counted as equal",
    "account_for_loss_in_pipeline_split": "stages are counted as equal",
    "deterministic_mode": "deterministic kernels are counted at the usual kernels' rates",
    "squared_relu": "the activation is counted as GELU",
    "spec": "blocks of a spec of its own are counted as the arguments say",
    "moe_pad_expert_input_to_capacity": "experts are counted with what comes to them",
    "moe_expert_capacity_factor": "experts are counted with what comes to them",
    "cuda_graph_impl": "launches are counted as without CUDA graphs",
    "enable_cuda_graph": "launches are counted as without CUDA graphs",
    "external_cuda_graph": "launches are counted as without CUDA graphs",
    "fine_grained_activation_offloading": "activations in host memory are not counted",
    "offload_modules": "activations in host memory are not counted",
    "fp4_format": "fp4 products are counted in 16 bit",
    "multi_latent_attention": "latent attention is counted where its ranks are there",
    "experimental_attention_variant": "attention of another kind is counted as full attention",
    "deepspeed_activation_checkpointing": "DeepSpeed's checkpointing is counted as whole blocks",
    "embed_layernorm": "one more norm is not counted",
    "freeze_vit": "of models that see, the language model is counted",
    "freeze_aligner": "of models that see, the language model is counted",
    "freeze_llm": "of models that see, the language model is counted",
    "padding_free": "samples are counted at their full length",
    "modules_to_save": "what is trained whole beside the adapters is not counted",
    "teacher_model": "a further model is not counted",
    "use_vllm": "generation is not counted",
    "vllm_mode": "generation is not counted",
    "num_generations": "generation is not counted",
    "max_completion_length": "generation is not counted",
    "overlap_moe_expert_parallel_comm": "exchanges between experts are counted as exposed",
    "moe_use_legacy_grouped_gemm": "experts are counted as grouped products",
    "enable_primus_turbo": "Primus Turbo's kernels are counted as Transformer Engine's",
    "turbo_sync_free_moe_stage": "what experts keep more without synchronisation is not counted",
    "enable_turbo_attention_float8": "attention in 8 bits is counted in 16",
    "lora": "adapters of these modules are counted as of all linear layers",
    "offload_model": "generation is not counted",
    "offload_optimizer": "generation is not counted",
    "offload_bridge": "generation is not counted",
    "sleep_level": "generation is not counted",
    "steps_per_generation": "generation is not counted",
    "vllm_max_model_len": "generation is not counted",
    "vllm_gpu_memory_utilization": "generation is not counted",
    "vllm_tensor_parallel_size": "generation is not counted",
    "recompute_layer_ids": "recomputation is counted as of all blocks",
    "router_aux_loss_coef": "the router's loss is not counted",
    "context_parallel_strategy": "context parallelism is counted as a ring",
    "cp_comm_type": "context parallelism is counted as a ring",
    "hierarchical_context_parallel_sizes": "context parallelism is counted as a ring",
    "num_distributed_optimizer_instances": "states are counted as sharded over all replicas",
    "freeze_parameters": "all weights are counted as trained",
    **dict.fromkeys(
        (
            "rl_use_sequence_packing",
            "perform_rl_step",
            "rl_sequence_packing_algo",
            "rl_partial_rollouts",
            "langrl_env_config",
        ),
        "generation is not counted",
    ),
    **dict.fromkeys(
        (
            "grpo_group_size",
            "grpo_iterations",
            "rl_generation_lag",
            "rl_training_cuda_graphs",
            "refit_method",
            "max_turns",
        ),
        "generation is not counted",
    ),
    **dict.fromkeys(
        ("dynamic_sample", "reward_funcs", "rollout", "use_gym_env", "gym_env"), "generation is not counted"
    ),
    **dict.fromkeys(("lmbda", "colocate_groups"), "generation is not counted"),
    **dict.fromkeys(("teacher", "teacher_model_server", "offload_teacher_model", "gkd_logits_topk"), _FURTHER),
    **dict.fromkeys(("export_kd_teacher_load", "export_kd_cfg"), _FURTHER),
    "no_fp8_weight_transpose_cache": "the transposed copies of fp8 weights are counted as kept",
    "fp8_param_gather": "weights are counted as all-gathered in 16 bits",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights are counted as all-gathered in 16 bits",
    **dict.fromkeys(
        ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        "all layers' products are counted in 8 bits",
    ),
    "fp4": "fp4 products are counted in 16 bit",
    "fp4_recipe": "fp4 products are counted in 16 bit",
    "grad_reduce_in_bf16": "gradients are counted as reduced in fp32",
    "megatron_fsdp_grad_comm_dtype": "gradients are counted as reduced in fp32",
    "megatron_fsdp_main_grads_dtype": "gradients are counted in fp32",
    "megatron_fsdp_main_params_dtype": "masters are counted in fp32",
    "outer_dp_sharding_strategy": "Megatron-FSDP is counted as its distributed optimizer",
    "use_bnb_optimizer": "states narrower than fp32 are not counted",
    "no_use_layer_wise_param_layout": "buckets are counted as dsplan's own",
    "cuda_graph_modules": "launches are counted as without CUDA graphs",
    "use_transformer_engine_op_fuser": "blocks are counted without Transformer Engine's fusion of products",
    "mtp_use_repeated_layer": "layers that predict further tokens are not counted",
    "mtp_use_separate_hc_head": "layers that predict further tokens are not counted",
    "microbatch_group_size_per_virtual_pipeline_stage": "virtual stages are counted as usual",
    "wgrad_deferral_limit": "weight gradients are counted where they arise",
    "step_batch_size_schedule": "the global batch is counted at its full size",
    **dict.fromkeys(("use_packed_attention", "enable_packed_sequences", "use_packed_sequence"), _PACKED),
    **dict.fromkeys(("enable_odc", "enable_odc_lb_mini", "sft", "packing_buffer_size"), _PACKED),
    **dict.fromkeys(
        (
            "use_sink_attention",
            "sink_sliding_window",
            "hybrid_attention_enabled",
            "linear_attention_freq",
            "is_hybrid_model",
        ),
        _OTHER_ATTENTION,
    ),
    **dict.fromkeys(
        ("lfm_layer_types", "attention_output_gate", "attn_sink", "dsa_indexer_topk", "kda_backend"), _OTHER_ATTENTION
    ),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"), _OTHER_ATTENTION),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        _OTHER_ATTENTION,
    ),
    "moe_latent_size": "experts are counted at the model's own width",
    "moe_layer_recompute": "recomputation of experts alone is not counted",
    "moe_extended_tp": "experts are counted whole on their ranks",
    "hc_use_sinkhorn": "hyper-connections are not counted",
    **dict.fromkeys(("img_h", "img_w", "patch_dim", "language_model_checkpoint"), _SEES),
    **dict.fromkeys(("total_seq_length", "dataloader_seq_length", "vit_gradient_checkpointing"), _SEES),
    **dict.fromkeys(("flextron", "enable_router", "slice"), "widths that training chooses are counted whole"),
    "export_model_type": "layers of other kinds than attention are counted as attention",
    "bitfit": "all weights are counted as trained",
    "num_labels": "a head of its own is counted as the language model's",
    "task_type": "a head of its own is counted as the language model's",
    "BASE_MODEL_ARGS": _FURTHER_RUN,
    "MODEL_ENV_VARS": _FURTHER_RUN,
    **{f"MODEL_ARGS_{number}": _FURTHER_RUN for number in range(2, 20)},
    "extends": "the config that it extends is not read",
    "linear_decoupled_in_proj": "adapters of these modules are counted as of all linear layers",
}
PLAIN = re.compile(
    r"""(
    modules\.\w+\.(framework|config|model|name) | dataloader_type | norm_target_loss | universal_checkpoint |
    loss_on_targets.* | .*weighted_split.* | max_position_embeddings | apply_wd.* | (no_)?(use_)?(mcore_models |
    persistent_ckpt_worker | checkpoint_(opt|args).*|legacy_.*|tokenizer_model.*|mmap.*) |
    .*(timers?|timing|tensorboard|throughput|memory_to|one_logger|straggler|inference|prompts
    |iterations_to_skip).* | async_save | dist_ckpt_.* | ckpt_.* | auto_detect_ckpt.* | no_ckpt.* | .*nvrx.* |
    non_persistent.* | disable_last_saving | attention_dropout | hidden_dropout | no_(bias|rope|masked|position)_.*
    | apply_(query|layernorm|residual|rope).* | bias_(gelu|swiglu|dropout|activation)_fusion |
    (no_)?gradient_accumulation_fusion | no_persist_layer_norm | .*rope_fusion | masked_softmax_fusion |
    (no_)?create_attention_mask.* | rotary_.* | use_rotary.* | rope_.* | yarn_.* | mscale.* | beta_(fast|slow) |
    norm_epsilon | layernorm_epsilon | qk_(layernorm|norm.*|clip.*) | softmax_.* | window_(size|attn.*) |
    moe_(router | aux | z_loss | token | grouped | permute |
    shared_expert_(overlap|gate)|input|per_layer|enable_deepep       |deepep|flex|hybrid|use_fused|apply).* |
    manual_gc.* | (no_)?(overlap|delay|align|defer)_.* | tp_comm.* | ddp_.* | disable_.* | use_flashinfer.* |
    rerun_.* | check_.* | no_check.* | empty_unused.* | eod_.* | reset_.* | mock_data | use_(turbo|fla)_.* |
    turbo_deepep.* | log_avg.* | stderr.* | auto_continue.* | original_max.* | calculate_per_token.* |
    cross_entropy_(loss|fusion).* | fused_ce.* | te_.* | use_tp_pp_dp.* | untie.* | mup.* | use_mup.* | bert_.* |
    vocab_extra.* | split | override_.* | decoupled.* | high_priority.* | nccl_.* |
    use_(cpu_init|dist_ckpt|ring|sharp|tensorboard|nccl).* | eval_.* | train_sync.* | max_tokens_to_oom | return_.*
    | top | num_tokens.* | incoming.* | output_every.* | tiktoken.* | no_.*fusion | exit.* | kill_switch.* |
    abort_on.* | data_impl | loss_scale.* | initial_loss.* | min_loss.* | hysteresis | dataset | val_dataset |
    system | stream | truncation.* | merge_lora | adapters | to_hf | save_safetensors | loss_scale | agent.* |
    external_plugins | log_completions | create_.* | import_.* | config | rank | group_query_attention | ENV.* |
    no_data.* | position_embedding.* | add_.*bias.* | model_(author|name|type|provider) | load_data.* | .*mcore.* |
    mock | flavor | peft(\.|_)(alpha|dropout) | pretrained_checkpoint | model\.moe_router.* | bf16 | fp16 |
    TEST_TYPE | LAUNCHER | MODE | .*_SCRIPT | TEST_.* | METRICS.* | SKIP.* | work_group | workspace |
    verify_integrity | async_.* | accumulate_allreduce.* | attention_softmax.* | sync_tp.* | pp_partition.* |
    optim_.* | .*moment.* | .*muon.* | enable_experimental | stage | sft_conversation_format |
    lora\.(alpha|dropout.*|lora_.*) | loss_type | beta | rpo_alpha | (un)?desirable_weight | use_ray | mtp_loss_.* |
    barrier_with.* | record_.* | nvtx_.* | sink_window.* | use_fused_weighted.* |
    linear_conv.* | conv_.* | sft_.* | grpo_(clamp|kl|entropy).* | error_injection.* | test_mode | turbo_.* |
    empty_cache.* | fla_.* | odc_.* | lb_mini.* | use_v4.* | use_kimi.* | fim_.* | rl_(submission|consumption).* |
    swiglu_limit | mxfp4_grad.* | weight_deosc.* | fused_single.* | train_tokens | export_default.* |
    dsa_indexer_(n_heads|head_dim|loss.*) | no_train | elastic.* | (HSA|NVTE|GPU_MAX|CLEAN|TURBO|LEGACY|USING)_.* |
    enable_fused_linear_ce | importance_sampling.* | add_non_thinking.* | enable_thinking | sft_alpha |
    advantage_estimator | vllm_server.* | new_special.* | tau_(pos|neg|init|decay) | use_hf | model_kwargs |
    teacher_kl_coef |
    (router|loss|budget|emb|mlp|mamba|moe_expert)_(beta|alpha|gbs|inter_dim|list|probs|type|int_list|std) |
    (binary|soft)_mask | hard_sample.* | original_model_sample.* | linear_scaler.* | attn_.*backend | llama_model |
    causal_lm | center_rewards_coefficient | epsilon(_high)? | overlong_filter
    )$""",
    re.VERBOSE,
)
"""Keys that change neither memory nor time."""
