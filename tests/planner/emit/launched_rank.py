"""Joins its peers as whoever launched it says, adds up a number over all, and writes down who it was."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from strategies.distributed.environment import join

here = join()
total = torch.tensor(float(here.rank + 1))
if here.world_size > 1:
    dist.all_reduce(total)
answer = {
    "arguments": [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")],
    "rank": here.rank,
    "local_rank": here.local_rank,
    "world_size": here.world_size,
    "local_world_size": here.local_world_size,
    "total": total.item(),
}
Path(f"rank{here.rank}.json").write_text(json.dumps(answer))
if dist.is_initialized():
    dist.destroy_process_group()
