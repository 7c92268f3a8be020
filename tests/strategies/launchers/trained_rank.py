"""A training whose loss at every step is the same whoever starts the ranks. `LOSSES` is the file it is appended to.

Every step takes `PAUSE` seconds longer until there is a file of that name with `.hurry` behind it.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import dsplan
from strategies.engine.initialize import Engine

STEPS = int(os.environ.get("STEPS", "6"))
BATCH = int(os.environ.get("BATCH", "32"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def main() -> None:
    torch.manual_seed(0)
    features = torch.randn(BATCH * STEPS, 16)
    engine, _, loader, _ = dsplan.initialize(
        model=Net(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        training_data=[{"x": row, "labels": (row.sum() > 0).long()} for row in features],
        config={"train_batch_size": BATCH},
        strategy=os.environ.get("STRATEGY", "ddp") or None,
    )
    losses = []
    for batch in loader:
        loss = engine(**batch)
        losses.append(loss.detach())
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            # Before the step, which does not return where the run is to stop after it.
            write_down(engine, torch.stack(losses).mean())
            losses = []
            if not os.path.exists(os.environ["LOSSES"] + ".hurry"):
                time.sleep(float(os.environ.get("PAUSE", "0")))
        engine.step()


def write_down(engine: Engine, mean: torch.Tensor) -> None:
    """Append a line: the step, the number of ranks, and their mean loss."""
    mean = mean / engine.environment.world_size
    if dist.is_initialized():
        dist.all_reduce(mean)
    if engine.is_main:
        with open(os.environ["LOSSES"], "a") as file:
            file.write(f"{engine.global_steps + 1} {engine.environment.world_size} {mean.item()!r}\n")


if __name__ == "__main__":
    main()
