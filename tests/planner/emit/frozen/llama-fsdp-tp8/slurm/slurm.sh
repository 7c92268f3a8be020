#!/usr/bin/env bash
# fsdp on 64 ranks: sbatch slurm.sh train.py ARGUMENTS
#SBATCH --job-name=dsplan
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
# The plan holds for a script that
#  - sets up tensor parallel 8, pipeline parallel 1, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 64)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - puts blocks under torch.compile
#  - runs the modules of torchtitan
#  - recomputes all but matrix products and attention; whole blocks would take less memory and more time
#  - uses torch.optim.AdamW
set -euo pipefail

# The first node of the job is where the others meet; the port is the job's own, for nodes that several jobs share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
RDZV_ID=$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT RDZV_ID

exec srun --kill-on-bad-exit=1 --cpu-bind=none torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${RDZV_ID:-dsplan}" "$@"
