"""A script of one's own around DDP, in the shape of nanoGPT's `train.py`; arguments: what wraps the model, and who
evaluates and saves (all, or rank 0)."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WRAPPER, WHO = sys.argv[1:3]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1337 + rank)
raw_model = Model()
if WRAPPER == "ddp":
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
    model: nn.Module = DistributedDataParallel(raw_model)
else:
    for part in (*raw_model.blocks, raw_model):
        fully_shard(part)
    model = raw_model
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=False)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 17))
    return ids[:, :-1], ids[:, 1:]


for step in range(4):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (step + 1)
    if step == 2 and (WHO == "all" or rank == 0):
        model.eval()
        with torch.no_grad():
            evaluated = model(*batch())[1].item()
        model.train()
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        _, loss = model(*batch())
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f} norm {float(norm):.4f}", flush=True)
if WHO == "all" or rank == 0:
    state = raw_model.state_dict()
    if rank == 0:
        torch.save(state, Path(os.environ["DSPLAN_RUN_DIR"]) / "model.pt")
dist.destroy_process_group()
