#!/usr/bin/env bash
# ddp on 8 ranks: bash mpirun.sh train.py ARGUMENTS
# The plan holds for a script that
#  - takes 2 samples per rank and step, accumulated 4 times (global batch 64)
#  - loads the model with dtype=torch.bfloat16, attn_implementation='sdpa'
#  - stores linear layers in 4 bits: quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16)
#  - trains qlora adapters (rank 16, on all-linear) beside frozen weights, with PEFT
#  - has a fused loss: Liger's, without logits
#  - uses bitsandbytes.optim.PagedAdamW8bit
#  - calls dsplan.initialize, or reads its rank from Open MPI's variables itself
set -euo pipefail

exec mpirun -np 8 --map-by ppr:8:node --bind-to none python -u "$@"
