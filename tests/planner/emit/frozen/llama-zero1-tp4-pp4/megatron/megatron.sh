#!/usr/bin/env bash
# zero1 on 64 ranks: bash megatron.sh --train-iters N --data-path ... --tokenizer-type ... ARGUMENTS
# The plan holds for a script that
#  - has its number of steps, data and tokenizer from you
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"
export CUDA_DEVICE_MAX_CONNECTIONS=1
: "${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}"

exec torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" \
    "$MEGATRON/pretrain_gpt.py" \
    --use-mcore-models \
    --num-layers 80 \
    --hidden-size 8192 \
    --ffn-hidden-size 28672 \
    --num-attention-heads 64 \
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
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 4 \
    --context-parallel-size 1 \
    --sequence-parallel \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1 \
    --bf16 \
    --micro-batch-size 2 \
    --global-batch-size 128 \
    --optimizer adam \
    --lr 5e-05 \
    --weight-decay 0.0 \
    --clip-grad 1.0 "$@"
