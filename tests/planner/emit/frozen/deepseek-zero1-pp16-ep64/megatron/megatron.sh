#!/usr/bin/env bash
# zero1 on 1024 ranks: bash megatron.sh --train-iters N --data-path ... --tokenizer-type ... ARGUMENTS
# The plan holds for a script that
#  - has its number of steps, data and tokenizer from you
#  - runs the modules of transformers; plan again with --code megatron for this trainer's own
#  - is given the model's rope base and scaling, which a plan does not hold
set -euo pipefail

# Run this on every node, with MASTER_ADDR set to the address of one of them.
: "${MASTER_ADDR:?set MASTER_ADDR to the address of one of the nodes}"
: "${MEGATRON:?set MEGATRON to a checkout of Megatron-LM}"

exec torchrun --nnodes=128 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" \
    "$MEGATRON/pretrain_gpt.py" \
    --use-mcore-models \
    --num-layers 61 \
    --hidden-size 7168 \
    --ffn-hidden-size 18432 \
    --num-attention-heads 128 \
    --seq-length 2048 \
    --vocab-size 129280 \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --qk-layernorm \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --hidden-dropout 0.0 \
    --attention-dropout 0.0 \
    --multi-latent-attention \
    --q-lora-rank 1536 \
    --kv-lora-rank 512 \
    --qk-head-dim 128 \
    --qk-pos-emb-head-dim 64 \
    --v-head-dim 128 \
    --num-experts 256 \
    --moe-router-topk 8 \
    --moe-ffn-hidden-size 2048 \
    --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall \
    --moe-shared-expert-intermediate-size 2048 \
    --moe-layer-freq "([0]*3+[1]*58)" \
    --max-position-embeddings 2048 \
    --padded-vocab-size 129280 \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 16 \
    --context-parallel-size 1 \
    --expert-model-parallel-size 64 \
    --expert-tensor-parallel-size 1 \
    --decoder-first-pipeline-num-layers 3 \
    --decoder-last-pipeline-num-layers 2 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 1 \
    --bf16 \
    --micro-batch-size 2 \
    --global-batch-size 4096 \
    --optimizer adam \
    --lr 5e-05 \
    --weight-decay 0.0 \
    --clip-grad 1.0 "$@"
