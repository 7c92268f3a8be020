"""A training whose loss at every step is the same whoever starts the ranks. `LOSSES` is the file it is appended to."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import dsplan

STEPS = int(os.environ.get("STEPS", "6"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def main() -> None:
    torch.manual_seed(0)
    features = torch.randn(32 * STEPS, 16)
    engine, _, loader, _ = dsplan.initialize(
        model=Net(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        training_data=[{"x": row, "labels": (row.sum() > 0).long()} for row in features],
        config={"train_batch_size": 32},
    )
    losses = []
    for batch in loader:
        loss = engine(**batch)
        losses.append(loss.detach())
        engine.backward(loss)
        engine.step()
        if len(losses) == engine.configuration.gradient_accumulation_steps:
            mean = torch.stack(losses).mean() / engine.environment.world_size
            losses = []
            if dist.is_initialized():
                dist.all_reduce(mean)
            if engine.is_main:
                with open(os.environ["LOSSES"], "a") as file:
                    file.write(f"{engine.global_steps} {engine.environment.world_size} {mean.item()!r}\n")
            time.sleep(float(os.environ.get("PAUSE", "0")))


if __name__ == "__main__":
    main()
