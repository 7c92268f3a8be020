"""Steps of a pipeline over four gloo ranks of which some are at half speed: unlike stages, even ones, the ideal cut.

    python -m scripts.measure.uneven_stages [--rounds 3] [--block-ms 20]

Four processes share this machine's cores, so that a rank's speed is made by sleeping: every block and the head of a
tiny GPT sleep in their forward and backward passes as long as the planner predicts that those of opt-1.3b take on an
A100, scaled so that a block's forward takes `--block-ms`; on a slow rank as long as they take on one at half speed.

The cuts are the plan's (`layers_per_stage` of `recommend`), one as even as they go, and of all cuts the one whose
schedule takes least by those seconds, which is run apart only where it is not the plan's. They run in turns; a figure
is the shortest step of all rounds, since whatever else runs on the machine only adds to it. Losses and weights after
the steps are held against the even cut's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.cluster.groups import level
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.split import blocks_per_piece
from planner.cost.timing.pipeline import one_forward_one_backward
from planner.cost.timing.step import stage_of
from planner.models.catalogue import find_model
from planner.search.estimate import job_of
from planner.search.request import Degrees, Request, WorkOptions, make_request
from planner.search.search import recommend
from planner.search.uneven_parts import Kind, kinds_of
from planner.types.plan import Plan
from planner.types.shares import write_sizes
from strategies.engine.initialize import initialize

MODEL, MICRO_BATCHES, RANKS = "opt-1.3b", 8, 4
WIDTH, LENGTH, VOCABULARY = 16, 8, 32
"""Of the tiny model that is trained: its products take a hundredth of what its blocks sleep."""
STEPS = 3
"""Of a round, the first of which is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A pipeline over ranks of which the last ones are slow."""

    pp: int
    slow: int
    """Ranks at half speed, the last of four."""

    @property
    def name(self) -> str:
        """The degrees and the rates."""
        data = RANKS // self.pp
        return f"pp {self.pp}{f' x dp {data}' if data > 1 else ''}, rates {RANKS - self.slow}x1,{self.slow}x0.5"


CASES = (Case(pp=4, slow=1), Case(pp=2, slow=2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Seconds of a micro-batch on a rank: of a block's two passes, and of the head's."""

    forward: float
    backward: float
    head_forward: float
    head_backward: float

    def passes(self, blocks: int, *, is_last: bool) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass of a stage."""
        return (
            blocks * self.forward + is_last * self.head_forward,
            blocks * self.backward + is_last * self.head_backward,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A way to cut the model: what is run, and by how long each rank sleeps."""

    plan: Plan
    ranks: tuple[Seconds, ...]
    steps: int = STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The shortest step of each cut of a case, and how far the plan's training is from the even cut's."""

    case: Case
    cuts: dict[str, tuple[int, ...]]
    """Blocks of each stage."""
    computed: dict[str, float]
    """Seconds of the schedule by what ranks sleep, without messages and products."""
    measured: dict[str, float]
    predicted: float
    """What the planner predicts an even cut over the plan's to take."""
    loss_difference: float
    parameter_difference: float

    def ratio(self, name: str, of: str = "ideal") -> float:
        """Return the measured seconds of a cut over another's."""
        return self.measured[name] / self.measured[of]


class Tiny(nn.Module):
    """A table, blocks of one product, and a head of its own."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([TinyBlock() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of ids [samples, LENGTH]."""
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class TinyBlock(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the same shape."""
        changed: torch.Tensor = hidden + self.line(hidden).tanh()
        return changed


# What ranks run.


def train(cut: Cut) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return the seconds and the losses of each step, and the weights of this rank's stage."""
    torch.manual_seed(3)
    plan, rank = cut.plan, dist.get_rank()
    engine, *_ = initialize(
        model=Tiny(int(plan.model["num_layers"])), optimizer=lambda own: torch.optim.SGD(own, lr=0.1), plan=plan
    )
    _sleep(engine.module, cut.ranks[rank])
    seconds, losses = [], []
    for step in range(cut.steps):
        batch = _samples(step, plan)[engine.data_parallel_rank :: engine.data_parallel_size]
        dist.barrier()
        begin = time.perf_counter()
        losses.append(engine.train_batch({"ids": batch[:, :-1], "targets": batch[:, 1:]}).item())
        seconds.append(time.perf_counter() - begin)
    return seconds, losses, {name: own.detach().clone() for name, own in engine.module.named_parameters()}


def _samples(step: int, plan: Plan) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (plan.configuration.global_batch_size, LENGTH + 1), generator=generator)


def _sleep(module: nn.Module, seconds: Seconds) -> None:
    for name, part in module.named_modules():
        if isinstance(part, TinyBlock):
            _sleep_in(part, seconds.forward, seconds.backward)
        elif name == "head":
            _sleep_in(part, seconds.head_forward, seconds.head_backward)


def _sleep_in(part: nn.Module, forward: float, backward: float) -> None:
    part.register_forward_pre_hook(lambda *_: time.sleep(forward))
    part.register_full_backward_hook(lambda *_: time.sleep(backward))


# What is asked, and measured.


def request_of(case: Case) -> Request:
    """Return the question: a pipeline of opt-1.3b on four nodes of one A100, the last ones at half speed."""
    one = resolve_cluster(HardwareRequest(gpu="A100-SXM4-80GB", gpus=1))
    fast, slow = replace(one, nodes=RANKS - case.slow), replace(one, nodes=case.slow, speed=0.5)
    batch = MICRO_BATCHES * RANKS // case.pp
    return make_request(
        find_model(MODEL),
        level([fast, slow]),
        WorkOptions(seq_len=2048, global_batch=batch),
        strategies=("ddp",),
        checkpointings=("none",),
        micro_batch=1,
        degrees=Degrees(pp=case.pp),
    )


def _work(kind: Kind, plan: Plan) -> Seconds:
    """Return what the planner predicts of a block and of the head on a kind of node."""
    job = job_of(kind.request, plan.configuration)
    stage, _ = stage_of(replace(job, stage=plan.configuration.pp - 1))
    block, head = stage.block, stage.head
    return Seconds(
        forward=block.forward,
        backward=block.backward + block.recomputed,
        head_forward=head.forward,
        head_backward=head.backward,
    )


def _scaled(work: Seconds, factor: float) -> Seconds:
    return Seconds(
        forward=work.forward * factor,
        backward=work.backward * factor,
        head_forward=work.head_forward * factor,
        head_backward=work.head_backward * factor,
    )


def _runnable(plan: Plan, blocks: Sequence[int]) -> Plan:
    """Return the plan of the tiny model with so many blocks in each stage."""
    chosen = replace(
        plan.configuration,
        precision="fp32",
        sequence_length=LENGTH,
        layers_per_stage=write_sizes((1, count) for count in blocks),
    )
    tiny = {
        "name": "tiny",
        "num_layers": sum(blocks),
        "parameters": sum(p.numel() for p in Tiny(sum(blocks)).parameters()),
    }
    cluster: Any = {"device": "cpu", "vendor": "cpu", "gpus": RANKS, "nodes": 1, "capacity_bytes": 2**34}
    return replace(plan, configuration=chosen, model=tiny, cluster=cluster)


def _every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, blocks), stages - 1)
    return [tuple(end - first for first, end in pairwise((0, *cut, blocks))) for cut in ends]


def measure(case: Case, pool: RankPool, *, rounds: int, block_seconds: float, steps: int = STEPS) -> Figures:
    """Measure a case's cuts in turns."""
    answer = recommend(request := request_of(case))
    uneven = answer.uneven
    assert uneven is not None
    assert uneven.by_stages is not None
    assert uneven.even is not None
    plan = replace(uneven.even, configuration=uneven.by_stages.configuration)
    fast, slow = (_work(kind, plan) for kind in kinds_of(request))
    factor = block_seconds / fast.forward
    ranks = [_scaled(fast, factor)] * (RANKS - case.slow) + [_scaled(slow, factor)] * case.slow
    stages = [ranks[stage * RANKS // case.pp] for stage in range(case.pp)]

    def schedule(blocks: Sequence[int]) -> float:
        passes = [
            own.passes(count, is_last=stage == case.pp - 1)
            for stage, (own, count) in enumerate(zip(stages, blocks, strict=True))
        ]
        forwards, backwards = zip(*passes, strict=True)
        return one_forward_one_backward(forwards, backwards, plan.configuration.gradient_accumulation_steps)

    layers = sum(plan.configuration.stage_layers)
    cuts = {
        "plan": plan.configuration.stage_layers,
        "even": blocks_per_piece(layers, case.pp),
        "ideal": min(_every_cut(layers, case.pp), key=schedule),
    }
    taken: dict[tuple[int, ...], list[float]] = {blocks: [] for blocks in cuts.values()}
    trained: dict[tuple[int, ...], tuple[list[float], dict[str, torch.Tensor]]] = {}
    for _ in range(rounds):
        for blocks, own_seconds in taken.items():
            each = pool.run(train, Cut(plan=_runnable(plan, blocks), ranks=tuple(ranks), steps=steps))
            own_seconds += each[0][0][1:]
            trained[blocks] = each[0][1], {key: value for _, _, own in each for key, value in own.items()}
    (losses, weights), (even_losses, even_weights) = (trained[cuts[name]] for name in ("plan", "even"))
    return Figures(
        case=case,
        cuts=cuts,
        computed={name: schedule(blocks) for name, blocks in cuts.items()},
        measured={name: min(taken[blocks]) for name, blocks in cuts.items()},
        predicted=uneven.even.time.step_seconds / uneven.by_stages.step_seconds,
        loss_difference=max(abs(a - b) for a, b in zip(losses, even_losses, strict=True)),
        parameter_difference=max((own - weights[name]).abs().max().item() for name, own in even_weights.items()),
    )


def _lines(figures: Figures) -> list[str]:
    lines = [figures.case.name]
    for name, blocks in figures.cuts.items():
        measured, computed = figures.measured[name], figures.computed[name]
        shown = write_sizes((1, count) for count in blocks)
        of_ideal = (
            f"{figures.ratio(name):.3f} of the ideal cut, {computed / figures.computed['ideal']:.3f} by its sleeps"
        )
        beside = f"{measured / computed:.3f} of {computed:.3f} s of sleep"
        lines.append(f"  {name:5} {shown:16} {measured:7.3f} s ({of_ideal}); {beside}")
    measured, predicted = figures.ratio("even", "plan"), figures.predicted
    lines.append(f"  even over plan: measured {measured:.3f}, predicted by the planner {predicted:.3f}")
    loss, weight = figures.loss_difference, figures.parameter_difference
    lines.append(f"  plan beside even: losses differ by {loss:.1e}, weights by {weight:.1e}")
    return lines


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of all cuts")
    parser.add_argument("--block-ms", type=float, default=20.0, help="milliseconds of a block's forward on a fast rank")
    options = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with RankPool(RANKS, timeout_seconds=300.0) as pool:
        for case in CASES:
            figures = measure(case, pool, rounds=options.rounds, block_seconds=options.block_ms / 1000)
            print("\n".join(_lines(figures)), flush=True)
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
