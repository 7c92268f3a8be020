"""Trains small models under every composition that the planner calls runnable, beside one process that trains alone.

    python -m scripts.measure.parity [--ranks 2 4 8] [--models gpt2 llama mixtral] [--precisions fp32 bf16]

Losses, gradient norms and every parameter after a few steps are compared; rows go to
hardware_db/measurements/parity_cpu.csv, and docs/reference/parity.md is written from them. The status is 1 where a
composition failed or differs. Nothing here lists compositions: what `planner.cost.combinations` opens is trained.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from itertools import groupby, product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hardware_db.files import replace_text
from hardware_db.measured_rows import SHIPPED, RunRow, read_rows, write_rows
from hardware_db.spawn import RankError, RankPool
from planner import vocabulary as words
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import DsplanError
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import estimate
from planner.search.request import Degrees, Request, WorkOptions, make_request
from planner.search.space import configuration_of, enumerate_candidates, micro_batches
from planner.types.plan import Configuration, Plan
from scripts.generate.generated import REFERENCE
from strategies.bench.measured_run import build_model
from strategies.distributed.gloo import quiet
from strategies.engine.initialize import initialize

ROWS = SHIPPED / "parity_cpu.csv"
PAGE = REFERENCE / "parity.md"
_COMMON = {"vocab_size": 128, "tie_word_embeddings": True}
_DECODER = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, **_COMMON}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"model_type": "llama", "intermediate_size": 128, "num_key_value_heads": 4, **_DECODER, **_COMMON},
    "mixtral": {"model_type": "mixtral", "intermediate_size": 64, "num_key_value_heads": 4, **_DECODER, **_COMMON}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}
LENGTH, GLOBAL_BATCH, STEPS = 32, 16, 5
LEARNING_RATE, MOMENTUM, CLIPPING = 0.05, 0.9, 1.0
"""Steps of SGD, whose result is in proportion to gradients: AdamW would hide a wrong factor before all of them."""
TOLERANCES: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-2}
"""What losses and parameters may be apart at most, absolute; norms of gradients relative, ten times as much."""
CALL_SECONDS = 90.0
CALLS_PER_POOL = 12
"""After so many compositions ranks start anew: every one leaves process groups behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRun(RunRow):
    """How far one composition came from one process."""

    KIND = "parity run"
    MEASURED = ("loss_difference", "norm_difference", "parameter_difference", "where", "outcome")

    cp: int
    ep: int
    sequence_parallel: bool
    pp_schedule: str
    virtual_stages: int
    loss_difference: float = 0.0
    """The largest of any step, nats."""
    norm_difference: float = 0.0
    """The largest of any step, as a share of the norm before clipping."""
    parameter_difference: float = 0.0
    """The largest of any element after the last step."""
    where: str = ""
    """The parameter that it is of, or what failed."""

    @property
    def split(self) -> str:
        """Its degrees, as tables name them."""
        found = " x ".join(f"{name} {getattr(self, name)}" for name in words.DEGREES if getattr(self, name) > 1)
        return found or "data parallel"

    @property
    def name(self) -> str:
        """The composition in a few words."""
        pipeline = f"{self.pp_schedule}{f' x {self.virtual_stages}' if self.virtual_stages > 1 else ''}"
        parts = [
            *(("sp",) if self.sequence_parallel else ()),
            *((pipeline,) if self.pp > 1 else ()),
            *((self.activation_checkpointing,) if self.activation_checkpointing != "none" else ()),
            *(("once a step",) if not self.sync_each_micro_batch else ()),
        ]
        backend = f" ({self.backend})" if self.backend != "torch" else ""
        return f"{self.strategy}{backend} {self.split}{''.join(f', {part}' for part in parts)}, {self.precision}"


def compositions(model: str, ranks: int, precision: str) -> Iterator[Plan]:
    """Every plan that the planner calls runnable on so many ranks, one for each way to lay them out; recomputation
    takes turns, so that each degree meets all of it."""
    seen: set[Configuration] = set()
    for nodes, zero in product((1, 2) if ranks > 2 else (1,), ("native", "deepspeed")):
        request = question(model, ranks, precision, nodes=nodes, zero=cast("words.Backend", zero))
        for turn, degrees in enumerate(_degrees(ranks)):
            for strategy in words.STRATEGIES if nodes == 1 else ("hsdp",):
                policy = words.CHECKPOINTINGS[(turn + words.STRATEGIES.index(strategy)) % len(words.CHECKPOINTINGS)]
                asked = replace(
                    request, degrees=degrees, strategies=(strategy,), checkpointings=(policy,), offload="none"
                )
                for layout in enumerate_candidates(asked):
                    # As many micro-batches as make rounds and a full pipeline, where the batch has them.
                    sizes = micro_batches(asked, layout)
                    wanted = max(2 * layout.pp, 2)
                    fitting = [size for size in sizes if GLOBAL_BATCH // (layout.data_parallel * size) >= wanted]
                    micro = max(fitting, default=min(sizes))
                    chosen = configuration_of(asked, layout, micro)
                    if chosen in seen:
                        continue
                    seen.add(chosen)
                    plan = estimate(asked, chosen)
                    if plan.runnable:
                        yield plan


def _degrees(ranks: int) -> Iterator[Degrees]:
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp, ep in product(sizes, repeat=4):
        if ranks % (tp * pp * cp):
            continue
        ways: list[dict[str, Any]] = [{}]
        if pp > 1:
            ways = [{"pp_schedule": name} for name in words.SCHEDULES]
        for way, splits_sequence in product(ways, (False, True) if tp > 1 else (False,)):
            yield Degrees(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=splits_sequence, **way)


def question(model: str, ranks: int, precision: str, *, nodes: int = 1, zero: words.Backend = "native") -> Request:
    """The training of a model on CPU ranks."""
    cluster = resolve_cluster(HardwareRequest(gpu="cpu", gpus=ranks, nodes=nodes))
    work = WorkOptions(
        seq_len=LENGTH, global_batch=GLOBAL_BATCH, precision=cast("words.Precision", precision), optimizer="sgd"
    )
    return make_request(facts_from_config(MODELS[model], model), cluster, work, zero_backend=zero)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a training leaves."""

    losses: list[float]
    norms: list[float]
    apart: dict[str, float]
    """How far the whole model's parameters are from those of one process, by their names."""


def samples_of(step: int) -> torch.Tensor:
    """The global batch of a step, [samples, length]."""
    return torch.randint(0, 128, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def _sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Right:
    """What one process leaves."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def alone(model: str, precision: str) -> Right:
    """One process, hand-written: whole batches, no engine."""
    module = build_model(MODELS[model], "causal-lm", "sdpa", torch.device("cpu"))
    optimizer = _sgd(module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        ids = samples_of(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cast("Any", module)(input_ids=ids, labels=ids).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Right(losses=losses, norms=norms, parameters={name: w.detach() for name, w in module.named_parameters()})


def trained_here(model: str, plan: Plan, right: Mapping[str, torch.Tensor]) -> Trained:
    """The same under a plan, on this rank, which compares the whole model with the `right` parameters."""
    module = build_model(MODELS[model], "causal-lm", "sdpa", torch.device("cpu"))
    engine, *_ = initialize(module, _sgd, plan=plan, config={"gradient_clipping": CLIPPING})
    engine.train()
    losses, norms = [], []
    for step in range(STEPS):
        own = samples_of(step).chunk(engine.data_parallel_size)[engine.data_parallel_rank]
        losses.append(_step(engine, own))
        norms.append(float(engine.gradient_norm or 0.0))
    state = engine.state_dict()
    apart = {name: float((state[name] - value).abs().max()) for name, value in right.items() if name in state}
    engine.close()
    return Trained(losses=losses, norms=norms, apart=apart)


def _step(engine: Any, own: torch.Tensor) -> float:
    """A step on this rank's samples; its loss over the global batch."""
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch({"input_ids": own, "labels": own}))
    total = torch.zeros(())
    for ids in own.split(engine.configuration.micro_batch_size):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.configuration.gradient_accumulation_steps
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def row_of(model: str, plan: Plan) -> ParityRun:
    """A plan as a row that nothing was measured for."""
    own = {item.name for item in fields(ParityRun)}
    chosen = {name: value for name, value in asdict(plan.configuration).items() if name in own}
    places = {"device": "cpu", "ranks_per_device": 1, "memory_limit_bytes": 0, "driver": "", "deepspeed": ""}
    versions = {"torch": version("torch"), "transformers": version("transformers")}
    return ParityRun(model=model, config="", task="causal-lm", outcome="", **chosen, **places, **versions)


def compared(row: ParityRun, right: Right, ranks: Sequence[Trained]) -> ParityRun:
    """The row with how far the ranks are from one process."""
    tolerance = TOLERANCES[row.precision]
    apart: dict[str, float] = {}
    for name, value in (item for rank in ranks for item in rank.apart.items()):
        apart[name] = max(value, apart.get(name, 0.0))
    if set(apart) != set(right.parameters):
        missing = sorted(set(apart) ^ set(right.parameters))
        return replace(row, outcome="failed", where=f"names differ: {' '.join(missing[:3])}")
    where = max(apart, key=lambda name: apart[name])
    losses = [abs(loss - one) for rank in ranks for loss, one in zip(rank.losses, right.losses, strict=True)]
    norms = [abs(norm / one - 1) for rank in ranks for norm, one in zip(rank.norms, right.norms, strict=True)]
    within = max(*losses, apart[where]) <= tolerance and max(norms) <= 10 * tolerance
    return replace(
        row,
        loss_difference=max(losses),
        norm_difference=max(norms),
        parameter_difference=apart[where],
        where=where,
        outcome="same" if within else "differs",
    )


class Ranks:
    """Pools of ranks that are started anew after so many calls, after a failure, and around DeepSpeed, which leaves
    state behind in its process."""

    def __init__(self, number: int) -> None:
        self._number, self._calls = number, 0
        self._kind = (False, False)
        self._pool: RankPool | None = None

    def run(self, model: str, plan: Plan, right: Mapping[str, torch.Tensor]) -> list[Trained]:
        chosen = plan.configuration
        # The one thread of quiet ranks would wait for stages that have nothing to send.
        kind = (chosen.backend == "deepspeed", chosen.pp > 1)
        if self._pool is None or self._calls >= CALLS_PER_POOL or kind != self._kind or kind[0]:
            self.close()
            variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            pool = RankPool(self._number, timeout_seconds=CALL_SECONDS, variables=variables)
            self._pool = pool if chosen.pp > 1 else quiet(pool)
            self._kind = kind
        self._calls += 1
        try:
            return self._pool.run(trained_here, model, plan, right)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool, self._calls = None, 0


def measure(model: str, ranks: int, precision: str, only: str = "") -> Iterator[ParityRun]:
    """A row for every composition, as it comes."""
    right, pools = alone(model, precision), Ranks(ranks)
    try:
        for plan in compositions(model, ranks, precision):
            row = row_of(model, plan)
            if only not in row.name:
                continue
            try:
                yield compared(row, right, pools.run(model, plan, right.parameters))
            except (RankError, DsplanError) as problem:
                yield replace(row, outcome="failed", where=_reason(problem))
    finally:
        pools.close()


def _reason(problem: Exception) -> str:
    """What the first rank that failed said."""
    reports = list(problem.reports.values()) if isinstance(problem, RankError) else [str(problem)]
    lines = [line for line in (reports or [str(problem)])[0].strip().splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"[\w.]+(Error|Exception|CannotRun|Refused)\b", line)]
    return ([*said, str(problem).splitlines()[0], *lines] if lines else [type(problem).__name__])[0][:300]


def page(runs: Sequence[ParityRun]) -> str:
    """The page of the largest differences."""
    good = [run for run in runs if run.outcome == "same"]
    lines = [
        "# Every composition beside one process",
        "",
        "Written by `python -m scripts.measure.parity`, which trains three small models (four blocks of GPT-2, LLaMA"
        f" and Mixtral, width 64) for {STEPS} steps under every composition of ranks that the planner calls runnable,"
        " and once in one process that uses no engine. Steps are SGD with momentum, clipped by the global norm; a"
        " composition is the same where losses and every parameter are within 1e-5 (fp32) or 2e-2 (bf16), and gradient"
        " norms within ten times that share.",
        "",
        f"{len(good)} of {len(runs)} compositions are the same.",
        "",
        "| model | ranks | split | precision | compositions | same | largest difference of a loss | of a parameter |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def line_of(run: ParityRun) -> tuple[str, int, str, str]:
        return run.model, run.world_size * run.cp, run.split, run.precision

    for (model, ranks, split, precision), group in groupby(sorted(runs, key=line_of), key=line_of):
        members = list(group)
        same = [run for run in members if run.outcome == "same"]
        loss = max((run.loss_difference for run in same), default=0.0)
        parameter = max((run.parameter_difference for run in same), default=0.0)
        lines.append(
            f"| {model} | {ranks} | {split} | {precision} | {len(members)} | {len(same)} | {loss:.1e} |"
            f" {parameter:.1e} |"
        )
    bad = [run for run in runs if run.outcome != "same"]
    if bad:
        lines += ["", "## What is not the same", "", "| model | composition | what |", "|---|---|---|"]
        lines += [f"| {run.model} | {run.name} | {run.outcome}: {run.where} |" for run in bad]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="*", choices=TOLERANCES, default=list(TOLERANCES))
    parser.add_argument("--only", default="", metavar="TEXT", help="compositions whose names hold this")
    parser.add_argument("--list", action="store_true", help="name the compositions and train none")
    options = parser.parse_args()
    failed = 0
    for model, ranks, precision in product(options.models, options.ranks, options.precisions):
        if options.list:
            for plan in compositions(model, ranks, precision):
                print(f"{model} {ranks}: {row_of(model, plan).name}")
            continue
        for run in measure(model, ranks, precision, options.only):
            known = {row.key: row for row in read_rows(ParityRun, ROWS)}
            write_rows(ParityRun, ROWS, {**known, run.key: run}.values())
            failed += run.outcome != "same"
            print(
                f"{model} {ranks}: {run.name}: {run.outcome}, loss {run.loss_difference:.1e},"
                f" norm {run.norm_difference:.1e}, parameter {run.parameter_difference:.1e} {run.where}",
                flush=True,
            )
    if not options.list:
        replace_text(PAGE, page(read_rows(ParityRun, ROWS)))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
