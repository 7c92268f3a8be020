"""A loop of accelerate's over images: it wraps the model, which claims nothing, and images show no tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
for images, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
ranks = torch.ones(1)
if dist.is_initialized():
    dist.all_reduce(ranks)
print("WRAPPED", type(model).__name__, ranks.item())
