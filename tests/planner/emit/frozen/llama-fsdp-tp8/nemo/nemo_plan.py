"""fsdp on 64 ranks for NeMo 2: bash torchrun.sh nemo_plan.py"""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

MODEL = llm.GPTConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
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
    recompute_granularity="selective",
    recompute_modules=["core_attn"],
    make_vocab_size_divisible_by=1,
)
DATA = llm.MockDataModule(  # random tokens: put llm.PreTrainingDataModule(paths=..., ...) of these sizes here
    seq_length=2048,
    micro_batch_size=2,
    global_batch_size=64,
)
TRAINER = nl.Trainer(
    accelerator="gpu",
    devices=8,
    num_nodes=8,
    max_steps=100,
    strategy=nl.MegatronStrategy(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=True,
        fsdp="megatron",
        save_ckpt_format="fsdp_dtensor",
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
        ),
    ),
    plugins=nl.MegatronMixedPrecision(
        precision="bf16-mixed",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        grad_reduce_in_fp32=True,
    ),
    use_distributed_sampler=False,
)
OPTIMIZER = nl.MegatronOptimizerModule(
    config=OptimizerConfig(
        optimizer="adam",
        lr=5e-05,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=True,
        fp16=False,
        use_distributed_optimizer=True,
    )
)

if __name__ == "__main__":
    llm.pretrain(model=llm.GPTModel(MODEL), data=DATA, trainer=TRAINER, optim=OPTIMIZER)
