"""zero1 on 64 ranks for Megatron-Bridge: bash torchrun.sh bridge_plan.py"""

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
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

MODEL = GPTModelProvider(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    seq_length=2048,
    vocab_size=128256,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    add_qkv_bias=False,
    qk_layernorm=False,
    share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    rotary_base=500000,
    kv_channels=128,
    num_query_groups=8,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=4,
    context_parallel_size=1,
    sequence_parallel=True,
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
        global_batch_size=128,
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
    tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128256),
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
