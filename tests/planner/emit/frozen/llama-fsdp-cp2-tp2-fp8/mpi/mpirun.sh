#!/usr/bin/env bash
# fsdp on 16 ranks: bash mpirun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - sets up tensor parallel 2, pipeline parallel 1, context parallel 2, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 32)
#  - loads the model with dtype=torch.float32, attn_implementation='sdpa'
#  - converts the linear layers of its blocks to fp8 with the rowwise recipe (torchao, or Transformer Engine) and computes in bf16 besides
#  - has a chunked loss: logits of a part of the tokens at a time
#  - uses torch.optim.AdamW
#  - calls dsplan.initialize, or reads its rank from Open MPI's variables itself
set -euo pipefail

# Run this on one node. HOSTFILE names all of them (a line per node: `name slots=RANKS`), MASTER_ADDR is the first.
: "${HOSTFILE:?set HOSTFILE to a file with a line per node}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
export MASTER_ADDR

exec mpirun -np 16 --map-by ppr:8:node --bind-to none --hostfile "$HOSTFILE" -x MASTER_ADDR python -u "$@"
