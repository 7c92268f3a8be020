#!/usr/bin/env bash
# fsdp on 64 ranks: bash megatron.sh --train-iters N --data-path ... --tokenizer-type ... ARGUMENTS
# The plan holds for a script that
#  - has its number of steps, data and tokenizer from you
#  - runs the modules of torchtitan; plan again with --code megatron for this trainer's own
#  - recomputes all but matrix products and attention; the trainer's own choice is another
#  - compiles its blocks, for which the trainer has no setting
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"
: "${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}"

exec torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" \
    "$MEGATRON/pretrain_gpt.py" \
    --use-mcore-models \
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --seq-length 2048 \
    --vocab-size 128256 \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --hidden-dropout 0.0 \
    --attention-dropout 0.0 \
    --rotary-base 500000 \
    --kv-channels 128 \
    --group-query-attention --num-query-groups 8 \
    --max-position-embeddings 2048 \
    --padded-vocab-size 128256 \
    --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 1 \
    --context-parallel-size 1 \
    --sequence-parallel \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --use-megatron-fsdp \
    --data-parallel-sharding-strategy optim_grads_params \
    --ckpt-format fsdp_dtensor \
    --recompute-granularity selective \
    --recompute-modules core_attn \
    --bf16 \
    --micro-batch-size 2 \
    --global-batch-size 64 \
    --optimizer adam \
    --lr 5e-05 \
    --weight-decay 0.0 \
    --clip-grad 1.0 "$@"
