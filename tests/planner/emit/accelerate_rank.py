"""A training script as accelerate's users write it: one step of a linear model under whatever launched it."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for samples in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(samples).square().mean())
        optimizer.step()
        optimizer.zero_grad()
state = accelerator.state
answer = {
    "rank": state.process_index,
    "world": state.num_processes,
    "device": state.device.type,
    "precision": state.mixed_precision,
    "type": str(state.distributed_type),
    "wrapper": type(model).__name__,
}
Path(f"rank{state.process_index}.json").write_text(json.dumps(answer))
accelerator.wait_for_everyone()
accelerator.end_training()
# Gloo's threads can abort a process that tears Python down; the answer is written.
os._exit(0)
