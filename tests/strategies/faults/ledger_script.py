"""A training script that writes down what it trains on, and that fails where the environment says so.

`LEDGER` is a folder. Before every optimizer step each rank appends a line to `rank{N}.jsonl` there: the step, the mean
loss of its micro-batches, the indices of their samples, and the step of the newest complete checkpoint in the folder
`CHECKPOINTS`. `FAULTS` is a JSON list of {"kind", "rank", "step"}: what goes wrong inside that rank just before that
step, once. `SETTINGS` is a JSON object; `suite.py` has it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dsplan

SETTINGS = json.loads(os.environ["SETTINGS"])
LEDGER = Path(os.environ["LEDGER"])
LATEST = Path(os.environ["CHECKPOINTS"]) / "latest"
GIB = 1 << 30


class Numbered(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that know their index."""

    def __init__(self, length: int) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.features = torch.randn(length, 32, generator=drawn)
        self.labels = (self.features.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.features[index], "labels": self.labels[index], "index": torch.tensor(index)}


class Net(nn.Module):
    """Blocks with dropout, so that a wrong random state shows in the loss."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inlet = nn.Linear(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def go_wrong(rank: int, step: int) -> None:
    """Fail as `FAULTS` says, each entry once, over all attempts."""
    for number, fault in enumerate(json.loads(os.environ.get("FAULTS", "[]"))):
        mark = LEDGER / f"fault{number}"
        if (rank, step) != (fault["rank"], fault["step"]) or mark.exists():
            continue
        mark.write_text(json.dumps({"time": time.time(), "rank": rank}))
        if fault["kind"] == "out_of_memory":
            torch.empty(_without_memory_for(GIB), dtype=torch.uint8)
        elif fault["kind"] == "host_memory":
            bytearray(_without_memory_for(GIB))
        elif fault["kind"] == "raise":
            raise ConnectionResetError("the data's server went away")
        elif fault["kind"] == "sleep":
            time.sleep(3600)
        elif fault["kind"] == "hold":  # the interpreter's lock: no other Python thread of this process runs
            re.match("(a+)+$", "a" * 60 + "b")


def _without_memory_for(size: int) -> int:
    """Let the kernel refuse this process so many bytes from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + size // 2, resource.RLIM_INFINITY))
    return size


def newest_checkpoint() -> int:
    """The step of the newest complete checkpoint, 0 where there is none."""
    match = re.match(r"step-(\d+)", LATEST.read_text()) if LATEST.exists() else None
    return int(match[1]) if match else 0


class Ledger:
    """This rank's lines. `start` is the same number on every rank of an attempt, and grows from attempt to attempt."""

    def __init__(self, rank: int, opening: dict[str, Any]) -> None:
        start = [time.time_ns()]
        if dist.is_initialized():
            dist.broadcast_object_list(start, src=0)
        self._start, self._path = start[0], LEDGER / f"rank{rank}.jsonl"
        self._losses: list[float] = []
        self._samples: list[int] = []
        self._append(opening)

    def micro_batch(self, loss: torch.Tensor, samples: torch.Tensor) -> None:
        self._losses.append(loss.item())
        self._samples += samples.tolist()

    def step(self, step: int, epoch: int) -> None:
        loss = sum(self._losses) / len(self._losses)
        row = {"step": step, "epoch": epoch, "loss": loss, "samples": self._samples, "newest": newest_checkpoint()}
        self._append({**row, "time": time.time()})
        self._losses, self._samples = [], []

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps({"start": self._start, **row}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine, _, loader, _ = dsplan.initialize(
        model=Net(SETTINGS["width"], SETTINGS["dropout"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SETTINGS["steps"]),
        training_data=Numbered(SETTINGS["samples"]),
        config={"train_batch_size": SETTINGS["batch"], "gradient_clipping": 1.0},
        strategy=SETTINGS.get("strategy"),
        backend=SETTINGS.get("backend"),
    )
    rank = engine.environment.rank
    chosen = engine.configuration
    plan = [chosen.strategy, chosen.backend, chosen.world_size, chosen.micro_batch_size, chosen.optimizer]
    ledger = Ledger(rank, {"resumed_at": engine.global_steps, "pid": os.getpid(), "plan": plan})
    while engine.global_steps < SETTINGS["steps"]:
        for batch in loader:
            go_wrong(rank, engine.global_steps + 1)
            time.sleep(SETTINGS["pause"])
            loss = engine(x=batch["x"], labels=batch["labels"])
            ledger.micro_batch(loss.detach(), batch["index"])
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                ledger.step(engine.global_steps + 1, loader.epoch)
            engine.step()
            if engine.global_steps >= SETTINGS["steps"]:
                break
    if engine.is_main:
        print(f"finished at step {engine.global_steps}", flush=True)


if __name__ == "__main__":
    main()
