"""Checkpointed modules that the script chose, and inputs that wait on the host: memory falls as a trace predicts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import DsplanError
from planner.models.catalogue import find_model
from strategies.tracing.step import checkpointing
from strategies.tracing.step.checkpointing import recompute, recomputed_modules
from strategies.tracing.step.step import trace_step
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies.tracing import trace_bodies as bodies
from tests.strategies.tracing.test_step import LENGTH, SAMPLES, configuration_of, job_of

WAYS = [("full", False), ("selective", False), ("full", True), ("selective", True)]


@pytest.fixture
def host_rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every tensor that is parked on the host; a CPU's memory is both, so that these are left out of what is
    counted as the device's."""
    sizes: list[int] = []
    parked_ones: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    make, measure = checkpointing.host_room, StorageTracker._measure

    def host_room(tensor: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            room = make(tensor)
        parked_ones.add(room.untyped_storage())
        sizes.append(room.nbytes)
        return room

    def measure_device(tracker: Any, storage: torch.UntypedStorage, **how: bool) -> None:
        if storage not in parked_ones:
            measure(tracker, storage, **how)

    monkeypatch.setattr(checkpointing, "host_room", host_room)
    monkeypatch.setattr(StorageTracker, "_measure", measure_device)
    return sizes


def peaks(kind: str, *, on_host: bool, chosen: type[nn.Module] = bodies.Block) -> tuple[dict[str, int], dict[str, int]]:
    """Traced and real peaks of a model whose modules of one class recompute."""
    configuration = configuration_of(optimizer="sgd")
    real, traced = (bodies.Own() for _ in range(2))
    for own in (real, traced):
        if kind != "none":
            modules = [module for module in own.module.modules() if isinstance(module, chosen)]
            recompute(own.module, modules, kind, on_host=on_host)
    return trace_step(job_of(find_model("gpt2"), configuration), traced).totals, bodies.single_peaks(
        real, configuration
    )


@pytest.mark.parametrize(("kind", "on_host"), WAYS)
@pytest.mark.parametrize("chosen", [bodies.Block, nn.Linear])
@pytest.mark.sweep(every=2)
def test_memory_falls_as_traced(kind: str, on_host: bool, chosen: type[nn.Module], host_rooms: list[int]) -> None:
    predicted, measured = peaks(kind, on_host=on_host, chosen=chosen)
    assert measured == pytest.approx(predicted, rel=0.001)


def test_what_waits_on_the_host_is_what_the_device_does_not_hold(host_rooms: list[int]) -> None:
    """Three blocks are each given one tensor; when the loss has been made nothing else of them is alive."""
    here, moved = (peaks("full", on_host=on_host)[1] for on_host in (False, True))
    none = peaks("none", on_host=False)[1]
    width = 4 * SAMPLES * LENGTH * bodies.WIDTH
    assert host_rooms == [width] * 3 * 2, "of two steps"
    assert here["loss"] - moved["loss"] == 3 * width
    assert none["loss"] - here["loss"] > 3 * width
    assert here["forward"] - moved["forward"] == 2 * width, "beside the last block, its own input is in use"
    assert here["backward"] == moved["backward"] < none["backward"], "at the first block, with all gradients made"


@pytest.mark.parametrize(("kind", "on_host"), WAYS)
def test_gradients_are_those_without_checkpointing(kind: str, on_host: bool) -> None:
    """Bit for bit, dropout's random numbers too. torch runs backward a second time through `full` alone."""

    def gradients(*, recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)))
        if recomputes:
            recompute(module, [module[1]], kind, on_host=on_host)
        for _ in range(2):
            loss = module(torch.ones(3, 4)).square().sum()
            loss.backward(retain_graph=kind == "full")
        if kind == "full":
            loss.backward()
        return [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]

    plain, again = gradients(recomputes=False), gradients(recomputes=True)
    assert len(plain) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_inputs_by_name_and_in_tuples_move_and_what_has_no_gradient_stays(host_rooms: list[int]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, pair: Any, *, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = pair[0] * pair[1] * mask * scale * self.weight
            return product.sum()

    block = Block()
    recompute(block, [block], "full", on_host=True)
    first, second, scale = (torch.full((5,), value, requires_grad=True) for value in (2.0, 3.0, 4.0))
    block((first, second), mask=torch.ones(5), scale=scale).backward()
    assert host_rooms == [20, 20, 20]
    assert [tensor.grad.tolist() for tensor in (first, second, scale) if tensor.grad is not None] == [
        [12.0] * 5,
        [8.0] * 5,
        [6.0] * 5,
    ]


def test_a_module_that_changes_its_input_is_named() -> None:
    class Adds(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            input += 1
            return super().forward(input)

    module = nn.Sequential(nn.Linear(2, 2), Adds(2, 2))
    recompute(module, [module[1]], "full", on_host=True)
    with pytest.raises(DsplanError, match="Adds changes it in place; write x = x"):
        module(torch.ones(1, 2))


def test_nothing_is_parked_where_there_is_no_backward(host_rooms: list[int]) -> None:
    module = nn.Linear(2, 2)
    recompute(module, [module], "full", on_host=True)
    with torch.no_grad():
        module(torch.ones(1, 2, requires_grad=True))
    assert host_rooms == []
    assert recomputed_modules(module) == [module]


def test_of_blocks_in_a_row_every_so_many_recompute() -> None:
    module = bodies.Own().module
    blocks = [block for block in module.modules() if isinstance(block, bodies.Block)]
    checkpointing.checkpoint_activations(module, "full", every=2)
    assert recomputed_modules(module) == blocks[::2] != blocks
