#!/usr/bin/env bash
# fsdp on 16 ranks: sbatch slurm.sh train.py ARGUMENTS
#SBATCH --job-name=dsplan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
# The plan holds for a script that
#  - sets up tensor parallel 2, pipeline parallel 1, context parallel 2, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 32)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - converts the linear layers of its blocks to fp8 with the rowwise recipe (torchao, or Transformer Engine) and computes in bf16 besides
#  - has a chunked loss: logits of a part of the tokens at a time
#  - uses torch.optim.AdamW
set -euo pipefail

# The first node of the job is where the others meet; the port is the job's own, for nodes that several jobs share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
RDZV_ID=$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT RDZV_ID

exec srun --kill-on-bad-exit=1 --cpu-bind=none torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$@"
