"""zero1 on 1024 ranks for Megatron-Bridge: bash torchrun.sh bridge_plan.py"""

import torch
from megatron.bridge.models.mla_provider import MLAModelProvider
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

TRAIN_ITERS = 100

MODEL = MLAModelProvider(
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    seq_length=2048,
    vocab_size=129280,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    add_qkv_bias=False,
    qk_layernorm=True,
    share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    num_moe_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_grouped_gemm=True,
    moe_token_dispatcher_type="alltoall",
    moe_shared_expert_intermediate_size=2048,
    moe_shared_expert_gate=False,
    moe_layer_freq=[0] * 3 + [1] * 58,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=16,
    context_parallel_size=1,
    sequence_parallel=False,
    expert_model_parallel_size=64,
    expert_tensor_parallel_size=1,
    num_layers_in_first_pipeline_stage=3,
    num_layers_in_last_pipeline_stage=2,
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=1,
    make_vocab_size_divisible_by=1,
    pipeline_dtype=torch.bfloat16,
)
CONFIG = ConfigContainer(
    model=MODEL,
    train=TrainingConfig(
        micro_batch_size=2,
        global_batch_size=4096,
        train_iters=TRAIN_ITERS,
    ),
    optimizer=OptimizerConfig(
        optimizer="adam",
        lr=5e-05,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=True,
        fp16=False,
        use_distributed_optimizer=True,
    ),
    scheduler=SchedulerConfig(lr_decay_style="constant", lr_decay_iters=TRAIN_ITERS),
    ddp=DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
    ),
    # Random tokens: put GPTDatasetConfig(data_path=..., seq_length=2048) here, and the tokenizer of the data.
    dataset=MockGPTDatasetConfig(
        seq_length=2048,
        random_seed=1234,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    ),
    tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=129280),
    logger=LoggerConfig(log_interval=1),
    checkpoint=CheckpointConfig(),
    dist=DistributedInitConfig(),
    mixed_precision=MixedPrecisionConfig(
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        grad_reduce_in_fp32=True,
    ),
)

if __name__ == "__main__":
    pretrain(config=CONFIG, forward_step_func=forward_step)
