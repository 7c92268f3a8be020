"""A Lightning script, which knows nothing of dsplan: it writes down its losses, and one of its ranks is killed once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Small(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, output: Path, *, faulty: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._output, self._faulty = output, faulty

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        ids, targets = batch
        return functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        with open(f"{self._output}.losses{self.global_rank}", "a") as file:
            file.write(json.dumps([self.current_epoch, index, outputs["loss"].item()]) + "\n")
        mark = self._output.with_suffix(".killed")
        if self._faulty and self.global_step == 3 and self.global_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(output: str, word: str) -> None:
    lightning.seed_everything(3)
    data = torch.randint(VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    train = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=4, shuffle=True)
    validation = DataLoader(TensorDataset(data[:8, :-1], data[:8, 1:]), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=2,
        strategy="ddp",
        devices=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Small(Path(output), faulty=word == "faulty"), train, validation)


if __name__ == "__main__":
    main(*sys.argv[1:])
