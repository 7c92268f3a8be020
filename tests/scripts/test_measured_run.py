"""Phases of a step and their peaks, with a meter that counts what it is told."""

from __future__ import annotations

import torch
from torch import nn

from scripts.measure.measured_run import PHASES, PhasePeaks, StepMemory
from strategies.telemetry.memory_report import reachable_tensors


class Counter:
    """Live bytes that the test sets; the peak follows."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0

    def use(self, size: int) -> None:
        self.live_bytes = size
        self.peak_bytes = max(self.peak_bytes, size)

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes


class Block(nn.Module):
    def __init__(self, meter: Counter, size: int) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self._meter, self._size = meter, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._meter.use(self._size)
        self._meter.use(5)
        out: torch.Tensor = self.inside(x)
        return out


def test_each_phase_has_the_largest_of_its_micro_batches() -> None:
    meter = Counter()
    model = nn.Module()
    model.blocks = blocks = nn.ModuleList([Block(meter, 10), Block(meter, 20)])
    peaks = PhasePeaks(meter)
    with peaks.following(model):
        for head, backward in ((30, 40), (50, 35)):
            peaks.enter("forward")
            x = torch.ones(1, 2)
            for block in blocks:
                x = block(x)
            meter.use(head)
            meter.use(5)
            peaks.enter("backward")
            meter.use(backward)
            blocks[1](x)  # run again, as activation checkpointing does: still backward
            meter.use(5)
        peaks.enter("step")
        meter.use(7)
        peaks.enter("")
    assert peaks.peaks == {"forward": 20, "loss": 50, "backward": 40, "step": 7}
    assert StepMemory(resident_bytes=5, phases=peaks.peaks).peak_bytes == 50
    assert not blocks[1]._forward_hooks


def test_a_model_without_blocks_has_no_border_between_forward_and_loss() -> None:
    meter = Counter()
    peaks = PhasePeaks(meter)
    with peaks.following(nn.Linear(2, 2)):
        peaks.enter("forward")
        meter.use(9)
        peaks.enter("backward")
    assert peaks.peaks == {**dict.fromkeys(PHASES, 0), "forward": 9}


def test_tensors_and_their_gradients_are_reached() -> None:
    weight = nn.Parameter(torch.ones(3))
    (weight * 2).sum().backward()
    reached = {id(tensor) for tensor in reachable_tensors()}
    assert {id(weight), id(weight.grad)} <= reached
