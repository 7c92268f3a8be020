"""Steps on real tensors that a trace is held to: one process, or one rank among several."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from planner.types.plan import Configuration
from strategies.tracing.step.checkpointing import checkpoint_activations
from strategies.tracing.storage_tracker import StorageTracker

WIDTH, LENGTH, CLASSES = 64, 128, 100
_OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw-forloop": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return changed


class Model(nn.Module):
    """Convolution, blocks and a loss: nothing that a transformer's closed form would know."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, WIDTH, 5, padding=2)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, signal: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(signal).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Own:
    """The module as a user's script would give it to the trace."""

    def __init__(self) -> None:
        self.module = Model()
        self.blocks = list(self.module.blocks)

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> dict[str, torch.Tensor]:
        labels = torch.zeros(samples, length, dtype=torch.long)
        return {"signal": torch.zeros(samples, 3, length), "labels": labels}


class Steps:
    """Steps of a module; the least peaks of the second and later ones by phase, in bytes. Among ranks a message that
    ends late holds its tensors for a moment more."""

    def __init__(self, subject: Any, module: nn.Module, configuration: Configuration) -> None:
        self._module, self._configuration = module, configuration
        self._batch = subject.batch_of(configuration.micro_batch_size, configuration.sequence_length)
        tensors = [value for value in self._batch.values() if isinstance(value, torch.Tensor)]
        self._tracker = StorageTracker([*module.parameters(), *module.buffers(), *tensors])
        self._phases: dict[str, int] = {}
        self._in_forward = False
        for block in subject.blocks:
            block.register_forward_hook(lambda *_: self._end("forward") if self._in_forward else None)

    def run(self, steps: int = 2) -> dict[str, int]:
        optimizer = _OPTIMIZERS[self._configuration.optimizer](list(self._module.parameters()))
        measured = []
        with self._tracker:
            for _ in range(steps):
                self._phases = {}
                self._step(optimizer)
                measured.append(self._phases)
        return {phase: min(step[phase] for step in measured[1:]) for phase in measured[-1]}

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        accumulation = self._configuration.gradient_accumulation_steps
        for _ in range(accumulation):
            self._tracker.restart_peak()
            self._in_forward = True
            with _autocast(self._configuration):
                output = self._module(**self._batch)
                loss = output if isinstance(output, torch.Tensor) else output.loss
                del output
            self._in_forward = False
            self._end("loss")
            (loss / accumulation).backward()
            del loss
            self._end("backward")
        optimizer.step()
        self._end("step")
        self._module.zero_grad(set_to_none=True)

    def _end(self, phase: str) -> None:
        self._phases[phase] = max(self._phases.get(phase, 0), self._tracker.peak_bytes)
        self._tracker.restart_peak()


def _autocast(configuration: Configuration) -> contextlib.AbstractContextManager[object]:
    if configuration.precision == "bf16" and configuration.strategy in ("single", "ddp"):
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def made_real(module: nn.Module) -> nn.Module:
    """A module from the meta device with weights that a step can compute with."""
    torch.manual_seed(0)
    real: Any = module.to_empty(device="cpu")
    if hasattr(real, "tie_weights"):
        real.tie_weights()
    with torch.no_grad():
        for weight in real.parameters():
            weight.normal_(0, 0.02)
        for buffer in real.buffers():
            buffer.fill_(1)
    return real


def single_peaks(subject: Any, configuration: Configuration) -> dict[str, int]:
    module = made_real(subject.module)
    if configuration.precision == "bf16-pure":
        module.to(torch.bfloat16)
    checkpoint_activations(module, configuration.activation_checkpointing)
    return Steps(subject, module, configuration).run()


def rank_peaks(configuration: Configuration) -> dict[str, int]:
    """The same on one of several ranks, with torch's DDP or FSDP2 around the module above."""
    own = Own()
    wrapped = _wrapped(own.module, own.blocks, configuration)
    return Steps(own, wrapped, configuration).run(4)


def _wrapped(module: nn.Module, blocks: Sequence[nn.Module], configuration: Configuration) -> nn.Module:
    if configuration.strategy == "ddp":
        return DistributedDataParallel(module)
    mesh = init_device_mesh("cpu", (configuration.dp_shard,))
    policy = MixedPrecisionPolicy()
    if configuration.precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    reshard = configuration.strategy == "fsdp"
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module
