#!/usr/bin/env bash
# fsdp on 8 ranks: bash verl.sh ARGUMENTS
# The plan holds for a script that
#  - has its data, and whatever else stands here in capitals, from you
set -euo pipefail

exec torchrun --standalone --nnodes=1 --nproc-per-node=8 -m verl.trainer.sft_trainer \
    model.path=opt-6.7b \
    data.max_length=2048 \
    data.micro_batch_size_per_gpu=2 \
    data.train_batch_size=64 \
    optim.lr=5e-05 \
    optim.weight_decay=0.0 \
    optim.clip_grad=1.0 \
    data.train_files=TRAIN.parquet \
    data.use_dynamic_bsz=false \
    data.pad_mode=no_padding \
    data.truncation=right \
    model.use_remove_padding=false \
    engine.strategy=fsdp2 \
    engine.model_dtype=fp32 \
    trainer.total_epochs=1 \
    'trainer.logger=[console]' \
    optim.optimizer=AdamW \
    optim.optimizer_impl=torch.optim \
    +model.override_config.attn_implementation=sdpa \
    model.enable_gradient_checkpointing=true \
    engine.dtype=bfloat16 \
    engine.offload_policy=false \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 "$@"
