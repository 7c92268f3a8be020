#!/usr/bin/env bash
# zero1 on 1024 ranks: bash mpirun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - sets up tensor parallel 1, pipeline parallel 16, expert parallel 64, because `dsplan run` cannot run such a plan yet; or emit it as torchtitan, megatron, megatron-bridge, nemo or nanotron
#  - takes 2 samples per rank and step, accumulated 32 times (global batch 4096)
#  - loads the model with dtype=torch.bfloat16, attn_implementation='sdpa'
#  - calls model.gradient_checkpointing_enable()
#  - uses torch.optim.AdamW
#  - calls dsplan.initialize, or reads its rank from Open MPI's variables itself
set -euo pipefail

# Run this on one node. HOSTFILE names all of them (a line per node: `name slots=RANKS`), MASTER_ADDR is the first.
: "${HOSTFILE:?set HOSTFILE to a file with a line per node}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
export MASTER_ADDR

exec mpirun -np 1024 --map-by ppr:8:node --bind-to none --hostfile "$HOSTFILE" -x MASTER_ADDR python -u "$@"
