"""A trace on fake tensors against a real step of the same module, storage by storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from hardware_db.probe import probe
from planner.cluster.resolve import probed_cluster
from planner.models.facts import ModelFacts
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from scripts.measure.compositions import CompositionRun, facts_of, read_compositions
from scripts.measure.modules import language_module, token_batch
from scripts.measure.term_rows import scored as scored_by
from strategies.tracing.live import facts_from_module
from strategies.tracing.module_trace import trace_activations, traced_facts, traced_request, work_of
from strategies.tracing.storage_tracker import StorageTracker
from tests.strategies.tracing.trace_bodies import LENGTH, WIDTH, Model

BATCH = 6
OWN_RUNS = [run for run in read_compositions() if run.model == "own gpt"]
CPU = probed_cluster(probe(), ranks=1).device


def own_run(strategy: str, **degrees: int) -> CompositionRun:
    """Return what real ranks measured of a step of the example's GPT in fp32."""
    wanted = {"dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, "strategy": strategy, "precision": "fp32", **degrees}
    return next(run for run in OWN_RUNS if all(getattr(run, name) == value for name, value in wanted.items()))


def batch_of(samples: int) -> dict[str, torch.Tensor]:
    labels = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"signal": torch.randn(samples, 3, LENGTH), "labels": labels}


def real_step(model: Model) -> tuple[int, int, int]:
    """Bytes beside parameters and inputs: kept after forward, at forward's peak, at backward's peak without
    gradients."""
    batch = batch_of(BATCH)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    with StorageTracker([*model.parameters(), *batch.values()]) as tracker:
        at_rest = tracker.live_bytes
        loss = model(**batch)
        kept, forward = tracker.live_bytes - at_rest, tracker.peak_bytes - at_rest
        tracker.restart_peak()
        loss.backward()
        return kept, forward, tracker.peak_bytes - at_rest


def test_a_trace_finds_what_a_real_step_uses() -> None:
    model = Model()
    traced = trace_activations(model, batch_of, "fp32", CPU)["fp32"]
    kept, forward, backward = real_step(model)
    # What does not grow with the batch (the loss, one gradient on its way) is not part of a trace.
    fixed = 2 * max(weight.nbytes for weight in model.parameters())
    assert BATCH * traced.kept == pytest.approx(kept, rel=0.01)
    assert BATCH * traced.forward == pytest.approx(forward, rel=0.01)
    assert BATCH * traced.backward == pytest.approx(backward, rel=0.01, abs=fixed)


def test_blocks_are_read_one_by_one() -> None:
    model = Model()
    traced = trace_activations(model, batch_of, "fp32", CPU)["fp32"]
    boundary = LENGTH * WIDTH * 4
    statistics = 2 * LENGTH * 4
    # Norm's output, the two tensors around GELU, the statistics, and the output; the input was there before.
    assert traced.block == boundary + 8 * boundary + boundary + statistics
    assert traced.boundary == boundary
    assert traced.products == 5 * boundary


def test_sixteen_bits_halve_what_is_kept_and_autocast_keeps_more() -> None:
    model = Model()
    full = trace_activations(model, batch_of, "fp32", CPU)["fp32"]
    narrow = trace_activations(model, batch_of, "bf16", CPU)
    assert narrow["pure"].block == pytest.approx(full.block / 2, rel=0.02)
    assert narrow["pure"].kept < narrow["autocast"].kept < full.kept


def test_the_module_is_left_as_it_was() -> None:
    model = Model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trace_activations(model, batch_of, "bf16", CPU)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# Modules that ranks split between them, beside what real ranks of gloo measured.


@pytest.fixture(scope="module")
def shared_by_two() -> ModelFacts:
    """The example's GPT, traced whole and as one of two tensor-parallel ranks."""
    return facts_of(next(run for run in OWN_RUNS if run.tp == 2 and run.precision == "fp32"))


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("ddp", {"tp": 2}), ("fsdp", {"tp": 2, "dp_shard": 2}), ("ddp", {"tp": 2, "pp": 2})]
)
@pytest.mark.slow
def test_a_rank_that_shares_layers_needs_what_real_ranks_measured(
    strategy: str, ranks: dict[str, int], shared_by_two: ModelFacts
) -> None:
    run = own_run(strategy, **ranks)
    error = scored_by(run, shared_by_two).error
    assert abs(error) <= 0.02
    whole = replace(shared_by_two, traced={mode: replace(t, parts={}) for mode, t in shared_by_two.traced.items()})
    assert scored_by(run, whole).error > 0.1


def test_more_ranks_than_were_traced_follow_those_of_two(shared_by_two: ModelFacts) -> None:
    assert abs(scored_by(own_run("ddp", tp=4), shared_by_two).error) <= 0.05


def test_blocks_that_run_again_are_taken_one_by_one(shared_by_two: ModelFacts) -> None:
    run = replace(own_run("fsdp", dp_shard=2), activation_checkpointing="full", predicted_bytes=0)
    kept, again = (scored_by(case, shared_by_two).predicted_bytes for case in (own_run("fsdp", dp_shard=2), run))
    block = shared_by_two.traced["fp32"].block - shared_by_two.traced["fp32"].boundary
    # Three of four blocks are not there when the last runs again, and gradients of one that works come on top.
    assert 2.5 * 8 * block <= kept - again <= 3.1 * 8 * block


def test_a_module_that_cannot_be_split_is_taken_as_whole() -> None:
    model = Model()
    whole = traced_facts(facts_from_module(model), model, batch_of(3), "fp32", CPU)
    split = traced_facts(facts_from_module(model), model, batch_of(3), "fp32", CPU, [(1, 2, 1, False)])
    assert split.traced["fp32"].of(tp=1, cp=2) == whole.traced["fp32"]


@pytest.mark.slow
def test_experts_are_traced_as_if_all_were_chosen_alike() -> None:
    sizes = {"own": "example", "layers": 2, "width": 64, "heads": 4, "length": LENGTH, "experts": 4}
    model, batch = language_module(sizes), token_batch(BATCH, LENGTH)
    traced = trace_activations(model, lambda samples: token_batch(samples, LENGTH), "fp32", CPU)["fp32"]
    with StorageTracker([*model.parameters(), *batch.values()]) as tracker:
        at_rest = tracker.live_bytes
        loss = model(**batch)
        kept = tracker.live_bytes - at_rest
    assert loss.requires_grad
    assert BATCH * traced.kept == pytest.approx(kept, rel=0.01)
    spread = partial(
        trace_activations, model, lambda samples: token_batch(samples, LENGTH), "fp32", CPU, (1, 1, 2, False)
    )
    alike, uneven = (spread(uneven=factor)["fp32"].kept for factor in (1.0, 1.5))
    # Tokens come and go, and a rank that is sent half as many more keeps the rows of its experts for these.
    assert 1.0 < alike / traced.kept < 1.1
    assert 1.1 < uneven / alike < 1.5


class Convolved(nn.Module):
    """Convolutions, batch norms, and a frozen buffer; its loss is left to the script."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 64, 3, stride=2), nn.BatchNorm2d(64))
        self.head = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(images - self.mean)).relu().mean((2, 3)))  # type: ignore[no-any-return]


def tabular() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.Linear(256, 1))


def planned_peak(module: nn.Module, batch: torch.Tensor, samples: int) -> int:
    """Of a plan whose model was traced with a batch of three."""
    facts = facts_from_module(module)
    task, length = work_of(facts, module, (batch[:3], torch.zeros(3)))
    cluster = probed_cluster(probe(), ranks=1)
    work = WorkOptions(task=task, seq_len=length, global_batch=samples, precision="fp32")
    request = traced_request(make_request(facts, cluster, work), module, (batch[:3], torch.zeros(3)))
    plan = estimate(*exact(request, ExactOptions(strategy="single", micro_batch=samples)))
    assert (task, length, plan.provenance["memory"]) == ("custom", 1, "traced")
    return plan.memory.peak_allocated_bytes


def measured_peak(module: nn.Module, batch: torch.Tensor) -> int:
    """Of the second of two steps of AdamW, all live bytes."""
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        module(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    with StorageTracker([*module.parameters(), *module.buffers(), *states, batch]) as tracker:
        step()
        tracker.restart_peak()
        step()
        return tracker.peak_bytes


@pytest.mark.parametrize("samples", [2, 8, 64])
@pytest.mark.parametrize(("make", "shape"), [(Convolved, (3, 32, 32)), (tabular, (64,))])
@pytest.mark.sweep(every=3)
def test_the_plan_of_a_module_without_tokens_has_the_memory_of_a_real_step(
    make: Callable[[], nn.Module], shape: tuple[int, ...], samples: int
) -> None:
    module, batch = make(), torch.randn(64, *shape)
    measured = measured_peak(module, batch[:samples].clone())
    assert planned_peak(module, batch, samples) == pytest.approx(measured, rel=0.02)


def test_operations_are_those_of_convolutions_and_products() -> None:
    traced = trace_activations(Convolved(), lambda n: torch.zeros(n, 3, 32, 32), "fp32", CPU)["fp32"]
    stem, second, head = 32 * 32 * 16 * 3 * 9, 15 * 15 * 64 * 16 * 9, 64 * 10
    assert traced.operations == 2 * (stem + second + head)
    assert traced.products_launched == 3
    # Subtraction, three products, two batch norms with a counter each, two ReLUs, the mean; the loss casts and adds.
    assert traced.kernels_launched <= 20
    # At least both batch norms and ReLUs read and write what the convolutions made.
    assert traced.moved > 4 * 4 * (32 * 32 * 16 + 15 * 15 * 64)


def test_a_module_is_traced_as_it_trains_and_given_back_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    trained = trace_activations(module, lambda n: torch.zeros(n, 32), "fp32", CPU)["fp32"]
    module.eval()
    assert trace_activations(module, lambda n: torch.zeros(n, 32), "fp32", CPU)["fp32"] == trained
    assert not any(part.training for part in module.modules())


def test_what_cannot_be_traced_is_said_in_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    module = nn.Linear(3, 3)
    facts = traced_facts(facts_from_module(module), module, torch.zeros(2, 5), "fp32", CPU)
    assert not facts.traced
    assert facts.note.startswith("tracing it on fake tensors failed: ")
    assert capfd.readouterr().err == ""
