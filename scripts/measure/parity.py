"""Trains small models under every composition that the planner calls runnable, beside one process that trains alone.

    python -m scripts.measure.parity [--ranks 2 4 8] [--models gpt2 llama mixtral] [--precisions fp32 bf16] [--resume]

Losses, gradient norms and every parameter after a few steps are compared; rows go to
hardware_db/measurements/parity_cpu.csv as they come, and docs/reference/parity.md is written from them. With `--resume`
what this code and these versions have trained to the same end is not trained again. The status is 1 where a composition
failed or differs. Nothing here lists compositions: what `planner.cost.combinations` opens is trained.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from functools import cache, cached_property
from hashlib import sha256
from importlib.metadata import version
from itertools import groupby, product
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from dsplan.diagnostics.bench.training import build_model
from hardware_db.files import replace_text
from hardware_db.measured_rows import SHIPPED, RunRow, read_rows, write_rows
from hardware_db.probe import probe
from planner import vocabulary as words
from planner.cost.combinations import why_refused
from planner.errors import ContradictoryRequest, DsplanError
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import estimate
from planner.search.request import Degrees, Request, WorkOptions, make_request
from planner.search.space import CandidateLayout, configuration_of, enumerate_candidates, micro_batches
from planner.types.plan import Configuration, Plan
from scripts.generate.generated import REFERENCE
from scripts.measure.machines import columns_of, measured_cluster
from strategies.engine.initialize import initialize

ROOT = Path(__file__).resolve().parents[2]
ROWS = SHIPPED / "parity_cpu.csv"
PAGE = REFERENCE / "parity.md"
_COMMON = {"vocab_size": 128, "tie_word_embeddings": True}
_DECODER = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 64}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 64, **_COMMON}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"model_type": "llama", "intermediate_size": 128, "num_key_value_heads": 4, **_DECODER, **_COMMON},
    "mixtral": {"model_type": "mixtral", "intermediate_size": 64, "num_key_value_heads": 8, **_DECODER, **_COMMON}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}
"""8 heads, so that tp 8 divides them; LLaMA's 4 heads of keys then lie on two ranks each."""
LENGTH, GLOBAL_BATCH, STEPS = 32, 16, 5
LEARNING_RATE, MOMENTUM, CLIPPING = 0.05, 0.9, 1.0
"""Steps of SGD, whose result is in proportion to gradients: AdamW would hide a wrong factor before all of them."""
LOSS_SCALE = 1024.0
"""Of fp16: one that does not change, since one process has another moment to find it."""
TOLERANCES: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""What losses and parameters may be apart at most, absolute; norms of gradients relative, ten times as much."""
DRIFT = 1e-3
"""In fp32 a parameter may be from one process's at most by this share of how far that moved it: a gradient of a small
parameter that lacks a factor stays below the other bounds. A hundred times as much where gradients are sent in fewer
bits; 16-bit precisions round parameters by more than they move."""
CALL_SECONDS = 240.0
_PRELOAD = ("torch", "transformers", "strategies.engine.initialize", "dsplan.diagnostics.bench.training")
WRITE_SECONDS = 5.0


def model_config(model: str, pp: int = 1) -> dict[str, Any]:
    """Return a model with blocks for two virtual stages on each of `pp` ranks."""
    config = dict(MODELS[model])
    config["n_layer" if model == "gpt2" else "num_hidden_layers"] = 2 * pp
    return config


# What is trained: what the planner calls runnable.


OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"precision": "fp16"},
    {"gradient_compression": "bf16"},
    {"gradient_compression": "fp16"},
    {"gradient_compression": "int8"},
    {"offload": "optimizer"},
    {"offload": "all"},
    {"offload": "nvme"},
    {"activation_checkpointing": "full", "activations_on_host": True},
    {"activation_checkpointing": "full", "checkpoint_every": 2},
)
"""What a plan may have beside strategy, degrees and recomputation; each meets every strategy and every degree."""
OPTIONS_RANKS = 4
RANKS, PRECISIONS = (2, 4, 8), ("fp32", "bf16")
MANY_RANKS = 8


def compositions(model: str, ranks: int, precision: str, *, every: bool = False) -> Iterator[Plan]:
    """Every plan that the planner calls runnable on so many ranks, one for each way to lay them out.

    Recomputation, and whether FSDP reduces in every micro-batch where ranks split the model, take turns: a layout has
    another one for each model and precision. Unless `every` one is asked for, so do schedules and sequence parallelism
    on more than 2 ranks, and on 8 precisions, and models where all of them have the degrees.
    """
    model_number, narrow = list(MODELS).index(model), list(TOLERANCES).index(precision)
    first = 7 * model_number + 5 * narrow
    for number, (kind, layouts) in enumerate(_kinds(model, ranks, precision, in_turn=not every and ranks > 2)):
        if ranks >= MANY_RANKS and not every:
            turn = crc32(repr(kind).encode())
            if turn % 2 != narrow or (kind.ep == 1 and turn // 2 % len(MODELS) != model_number):
                continue
        turn = first + number
        plan = _first_runnable([*layouts[turn % len(layouts) :], *layouts[: turn % len(layouts)]], turn)
        if plan is not None:
            yield plan


Asked = tuple[Request, CandidateLayout]


def _kinds(model: str, ranks: int, precision: str, *, in_turn: bool) -> Iterator[tuple[CandidateLayout, list[Asked]]]:
    """Layouts that differ in what takes turns alone, each with the question that it answers."""
    whole = tuple(strategy for strategy in words.STRATEGIES if strategy != "hsdp")
    ways: list[tuple[int, words.Backend, tuple[words.Strategy, ...]]] = [
        *((1, "native", whole), (1, "deepspeed", tuple(name for name in whole if name in words.ZERO_STAGES))),
        *(((2, "native", ("hsdp",)),) if ranks > 2 else ()),
    ]
    for nodes, zero, strategies in ways:
        layouts: dict[CandidateLayout, list[Asked]] = {}
        for degrees in _degrees(ranks):
            request = question(model, ranks, precision, nodes=nodes, zero=zero, pp=degrees.pp)
            request_of_degrees = replace(request, degrees=degrees, strategies=strategies, offload="none")
            for layout in enumerate_candidates(request_of_degrees):
                if zero == "deepspeed" and layout.splits_model:  # which our own ZeRO runs
                    continue
                kind = replace(layout, checkpointing="none")
                if in_turn:
                    kind = replace(kind, sequence_parallel=False, pp_schedule="1f1b", virtual_stages=1)
                layouts.setdefault(kind, []).append((request_of_degrees, layout))
        yield from layouts.items()


def _first_runnable(layouts: Sequence[Asked], turn: int) -> Plan | None:
    """Return the first of layouts that runs, with micro-batches for rounds and a full pipeline if there are as many."""
    for request, layout in layouts:
        if layout.splits_model and layout.strategy in words.FSDP_STRATEGIES:
            layout = replace(layout, sync_each_micro_batch=turn % 2 == 0)
        wanted = max(min(2 * layout.pp, 8), 2)

        def rounds(size: int, layout: CandidateLayout = layout, wanted: int = wanted) -> tuple[bool, int]:
            return GLOBAL_BATCH // (layout.data_parallel * size) < wanted, -size

        for micro in sorted(micro_batches(request, layout), key=rounds):
            chosen = configuration_of(request, layout, micro)
            if not why_refused(chosen):
                return estimate(request, chosen)
    return None


def with_options(model: str) -> Iterator[Plan]:
    """Yield each of `OPTIONS` under each strategy with each degree of 2 beside data parallelism, where runnable.

    Models take turns but where only one has the degree.
    """
    runnable = dict[tuple[str, str], Configuration]()
    for kind, layouts in _kinds(model, OPTIONS_RANKS, "fp32", in_turn=False):
        degrees = [name for name in words.DEGREES if getattr(kind, name) > 1]
        is_usual = kind.pp_schedule == "1f1b" and not kind.sequence_parallel
        sizes = [getattr(kind, name) for name in degrees]
        if is_usual and sizes == [2] and (kind.strategy, degrees[0]) not in runnable:
            plan = _first_runnable(layouts, turn=0)
            if plan is not None:
                runnable[kind.strategy, degrees[0]] = plan.configuration
    for turn, ((strategy, degree), option) in enumerate(product(runnable, OPTIONS)):
        if degree != "ep" and turn % len(MODELS) != list(MODELS).index(model):
            continue
        chosen = runnable[strategy, degree]
        request = question(model, OPTIONS_RANKS, option.get("precision", "fp32"), pp=chosen.pp)
        try:
            plan = estimate(request, replace(chosen, **option))
        except ContradictoryRequest:  # nothing has such a one
            continue
        if plan.runnable:
            yield plan


def plans_of(model: str, ranks: int, precision: str, *, every: bool = False) -> list[Plan]:
    """All that is trained of a model on so many ranks; the options are beside its fp32."""
    beside = with_options(model) if (ranks, precision) == (OPTIONS_RANKS, "fp32") else ()
    return [*compositions(model, ranks, precision, every=every), *beside]


def _degrees(ranks: int) -> Iterator[Degrees]:
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp, ep in product(sizes, repeat=4):
        if ranks % (tp * pp * cp):
            continue
        ways: list[dict[str, Any]] = [{}]
        if pp > 1:
            ways = [{"pp_schedule": name} for name in words.SCHEDULES]
        for degrees, splits_sequence in product(ways, (False, True) if tp > 1 else (False,)):
            yield Degrees(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=splits_sequence, **degrees)


@cache
def question(
    model: str, ranks: int, precision: str, *, nodes: int = 1, zero: words.Backend = "native", pp: int = 1
) -> Request:
    """Return the training of a model on CPU ranks."""
    cluster = measured_cluster("cpu", ranks, nodes=nodes)
    work = WorkOptions(
        seq_len=LENGTH, global_batch=GLOBAL_BATCH, precision=cast("words.Precision", precision), optimizer="sgd"
    )
    return make_request(facts_from_config(model_config(model, pp), model), cluster, work, zero_backend=zero)


# A row.


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRun(RunRow):
    """The distance of one composition from one process."""

    KIND = "parity run"
    MEASURED = (
        *("loss_difference", "norm_difference", "parameter_difference", "drift", "where", "date", "code"),
        *("cpu", "cores"),
    )

    cp: int
    ep: int
    sequence_parallel: bool
    pp_schedule: str
    virtual_stages: int
    gradient_compression: str
    activations_on_host: bool
    checkpoint_every: int
    loss_difference: float = 0.0
    """The largest of any step, nats."""
    norm_difference: float = 0.0
    """The largest of any step, as a share of the norm before clipping."""
    parameter_difference: float = 0.0
    """The largest of any element after the last step."""
    drift: float = 0.0
    """In fp32, the largest of any parameter's 2-norm, as a share of how far one process moved it and a hundredth of
    all."""
    where: str = ""
    """The parameter that `parameter_difference` is of, or what failed."""
    date: str = ""
    """When, UTC."""
    code: str = ""
    """Of which code: `code_digest`."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.world_size * self.cp

    @property
    def split(self) -> str:
        """Its degrees, as tables name them."""
        split = " x ".join(f"{name} {getattr(self, name)}" for name in words.DEGREES if getattr(self, name) > 1)
        return split or "data parallel"

    @property
    def option(self) -> str:
        """Return which of `OPTIONS` it has; empty for none."""
        parts = [
            *(("fp16",) if self.precision == "fp16" else ()),
            *((f"gradients in {self.gradient_compression}",) if self.gradient_compression != "none" else ()),
            *((f"offload {self.offload}",) if self.offload != "none" else ()),
            *(("activations on the host",) if self.activations_on_host else ()),
            *((f"one block in {self.checkpoint_every} checkpointed",) if self.checkpoint_every > 1 else ()),
        ]
        return ", ".join(parts)

    @property
    def engine(self) -> str:
        """Its strategy, with what runs it where that is not torch."""
        return f"{self.strategy} ({self.backend})" if self.backend != "torch" else self.strategy

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule."""
        return f"{self.pp_schedule}{f' x {self.virtual_stages}' if self.virtual_stages > 1 else ''}"

    @property
    def name(self) -> str:
        """The composition in a few words."""
        parts = [
            *(("sp",) if self.sequence_parallel else ()),
            *((self.schedule,) if self.pp > 1 else ()),
            *((self.activation_checkpointing,) if self.activation_checkpointing != "none" else ()),
            *(("once a step",) if not self.sync_each_micro_batch else ()),
            *((self.option,) if self.option not in ("", self.precision) else ()),
        ]
        replicas = f" {self.dp_replicate} x {self.dp_shard}" if self.strategy == "hsdp" else ""
        return f"{self.engine}{replicas} {self.split}{''.join(f', {part}' for part in parts)}, {self.precision}"


def row_of(model: str, plan: Plan) -> ParityRun:
    """Return a plan as a row that nothing was measured for."""
    own = {item.name for item in fields(ParityRun)}
    chosen = {name: value for name, value in asdict(plan.configuration).items() if name in own}
    deepspeed = version("deepspeed") if plan.configuration.backend == "deepspeed" else ""
    places = {"device": "cpu", "ranks_per_device": 1, "memory_limit_bytes": 0, "driver": ""}
    versions = {"torch": version("torch"), "transformers": version("transformers"), "deepspeed": deepspeed}
    about: dict[str, Any] = {**chosen, **places, **versions}
    return ParityRun(model=model, config="", task="causal-lm", outcome="", **about)


@cache
def code_digest() -> str:
    """Return 12 hex digits of a digest over the code that decides what is trained and how."""
    digest = sha256(Path(__file__).read_bytes())
    for path in sorted(path for room in ("planner", "strategies") for path in (ROOT / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# Training, alone and on ranks.


def samples_of(step: int) -> torch.Tensor:
    """Return the global batch of a step, [samples, length]."""
    return torch.randint(0, 128, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def _sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def _module(model: str, pp: int) -> nn.Module:
    return build_model(model_config(model, pp), "causal-lm", "sdpa", torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Right:
    """The results that one process leaves."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    moved: dict[str, float]
    """How far each parameter moved, its 2-norm."""

    @cached_property
    def scales(self) -> dict[str, float]:
        """Return what a parameter's difference is a share of: a bias without a gradient moves by rounding alone."""
        least = 0.01 * sum(norm**2 for norm in self.moved.values()) ** 0.5
        return {name: norm + least for name, norm in self.moved.items()}


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@cache
def alone(model: str, pp: int, precision: str) -> Right:
    """One process, hand-written: whole batches, no engine."""
    module = _module(model, pp)
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = _sgd(module.parameters())
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    losses, norms = [], []
    for step in range(STEPS):
        ids = samples_of(step)
        with torch.autocast("cpu", _AUTOCAST.get(precision, torch.bfloat16), enabled=precision in _AUTOCAST):
            loss = cast("Any", module)(input_ids=ids, labels=ids).loss
        (loss * scale).backward()
        torch._foreach_div_([p.grad for p in module.parameters() if p.grad is not None], scale)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    moved = {name: float((parameters[name] - value).norm()) for name, value in start.items()}
    return Right(losses=losses, norms=norms, parameters=parameters, moved=moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The results that a training leaves."""

    losses: list[float]
    norms: list[float]
    apart: dict[str, tuple[float, float]]
    """How far the whole model's parameters are from those of one process, by their names: the largest element's
    difference, and the 2-norm of all."""


def trained_here(model: str, plan: Plan, right: Mapping[str, torch.Tensor]) -> Trained:
    """Train the same under a plan on this rank, which compares the whole model with the `right` parameters."""
    module = _module(model, plan.configuration.pp)
    config: dict[str, Any] = {"gradient_clipping": CLIPPING}
    if plan.configuration.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    engine, *_ = initialize(module, _sgd, plan=plan, config=config)
    engine.train()
    losses, norms = [], []
    for step in range(STEPS):
        own = samples_of(step).chunk(engine.data_parallel_size)[engine.data_parallel_rank]
        losses.append(float(engine.train_batch({"input_ids": own, "labels": own})))
        norms.append(float("nan") if engine.gradient_norm is None else float(engine.gradient_norm))
    state = engine.state_dict()
    apart = {
        name: (float((state[name] - value).abs().max()), float((state[name] - value).float().norm()))
        for name, value in right.items()
        if name in state
    }
    engine.close()
    return Trained(losses=losses, norms=norms, apart=apart)


def compared(row: ParityRun, right: Right, ranks: Sequence[Trained]) -> ParityRun:
    """Return the row with how far the ranks are from one process."""
    tolerance = TOLERANCES["fp32" if row.gradient_compression == "none" else "bf16"]
    tolerance = max(tolerance, TOLERANCES[row.precision])
    largest_drift = DRIFT if tolerance == TOLERANCES["fp32"] else 100 * DRIFT
    apart: dict[str, float] = {}
    drift = 0.0
    for name, (largest, norm) in (item for rank in ranks for item in rank.apart.items()):
        apart[name] = max(largest, apart.get(name, 0.0))
        drift = max(drift, norm / right.scales[name] if row.precision == "fp32" else 0.0)
    if set(apart) != set(right.parameters):
        missing = sorted(set(apart) ^ set(right.parameters))
        return replace(row, outcome="failed", where=f"names differ: {' '.join(missing[:3])}")
    where = max(apart, key=lambda name: apart[name])
    losses = [abs(loss - expected) for rank in ranks for loss, expected in zip(rank.losses, right.losses, strict=True)]
    norms = [abs(norm / expected - 1) for rank in ranks for norm, expected in zip(rank.norms, right.norms, strict=True)]
    # Written so that what is not a number is not within.
    within = all(value <= tolerance for value in (*losses, *apart.values()))
    within = within and all(value <= 10 * tolerance for value in norms) and drift <= largest_drift
    return replace(
        row,
        loss_difference=max(losses),
        norm_difference=max(norms),
        parameter_difference=apart[where],
        drift=drift,
        where=where,
        outcome="same" if within else "differs",
    )


class Ranks:
    """Ranks for one composition after another, each with a pool of its own, forked in less than a second.

    The threads of gloo's groups outlive the groups. DeepSpeed's are kept, which would import it again.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._is_deepspeed = False
        self._pool: RankPool | None = None
        self._folder = tempfile.mkdtemp(prefix="dsplan-parity-")

    def run(self, model: str, plan: Plan, right: Mapping[str, torch.Tensor]) -> list[Trained]:
        """Return what every rank trained under a plan."""
        is_deepspeed = plan.configuration.backend == "deepspeed"
        if self._pool is None or not (is_deepspeed and self._is_deepspeed):
            self.close()
            variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            variables |= {"DSPLAN_NVME_PATH": self._folder}
            imported = () if is_deepspeed else _PRELOAD
            self._pool = RankPool(self._number, timeout_seconds=CALL_SECONDS, variables=variables, preload=imported)
            self._is_deepspeed = is_deepspeed
        try:
            return self._pool.run(trained_here, model, plan, right)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        """Stop all ranks."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def measured(model: str, plan: Plan, ranks: Ranks, report: Callable[[str], None] = lambda text: None) -> ParityRun:
    """Return the row of one composition, trained now; `report` takes what ranks say of a failure."""
    chosen = plan.configuration
    right = alone(model, chosen.pp, chosen.precision)
    today = datetime.now(timezone.utc).date().isoformat()
    row = replace(row_of(model, plan), date=today, code=code_digest(), **columns_of(probe()))
    try:
        return compared(row, right, ranks.run(model, plan, right.parameters))
    except (RankError, DsplanError) as problem:
        report(str(problem))
        return replace(row, outcome="failed", where=_reason(problem))


def _reason(problem: Exception) -> str:
    """Return what the first rank that failed said."""
    reports = list(problem.reports.values()) if isinstance(problem, RankError) else [str(problem)]
    lines = [line for line in (reports or [str(problem)])[0].strip().splitlines() if line.strip()]
    problems = [line for line in lines if re.match(r"[\w.]+(Error|Exception|CannotRun|Refused)\b", line)]
    return ([*problems, str(problem).splitlines()[0], *lines] if lines else [type(problem).__name__])[0][:300]


# The page.


def page(runs: Sequence[ParityRun], left: int = 0) -> str:
    """Return the page of the largest differences; so many compositions are `left`, which were never trained."""
    good = [run for run in runs if run.outcome == "same"]
    dates = sorted({run.date for run in runs} or {""})
    versions = sorted({f"torch {run.torch}, transformers {run.transformers}" for run in runs})
    deepspeed = sorted({run.deepspeed for run in runs if run.deepspeed})
    sizes = sorted({run.ranks for run in runs})
    lines = [
        "# Every composition beside one process",
        "",
        "Written by `python -m scripts.measure.parity`, which trains three small models (blocks of GPT-2, LLaMA and"
        f" Mixtral, width 64; two, or two for each rank of a pipeline) for {STEPS} steps under every composition that"
        " the planner calls runnable, and once in one process that uses no engine. Steps are SGD with momentum, clipped"
        " by the global norm, and have several micro-batches where the batch allows it; recomputation takes turns. A"
        " composition is the same where losses and every element of every parameter are within 1e-5 (fp32) or 2e-2"
        " (bf16, fp16, and gradients sent in fewer bits), and gradient norms within ten times that share; in fp32 no"
        f" parameter may be further away than {DRIFT:.0e} of how far one process moved it (and a hundredth of how far"
        " it moved the model). Figures are the largest of those that are the same: of a loss in nats, of a gradient"
        " norm as a share, of an element of a parameter.",
        "",
        "On more than 2 ranks schedules and sequence parallelism take turns too, and on"
        f" {MANY_RANKS} precisions, and models where all have the degrees; `--every` trains all of them.",
        "",
        f"**{len(good)} of {len(runs)} are the same**, on {_listed(map(str, sizes))} gloo ranks of a CPU,"
        f" {' to '.join(dict.fromkeys((dates[0], dates[-1])))} (UTC), with {'; '.join(versions)}"
        f"{f', DeepSpeed {_listed(deepspeed)}' if deepspeed else ''}."
        + (f" {left} more were not trained yet, which `--missing` does." if left else ""),
        "",
    ]
    plain = [run for run in runs if not run.option]
    lines += ["## By split", "", *_table(plain, ("model", "ranks", "split")), ""]
    lines += ["## By strategy", "", *_table(plain, ("engine", "activation_checkpointing")), ""]
    staged = [run for run in plain if run.pp > 1]
    if staged:
        lines += ["## By schedule", "", *_table(staged, ("schedule", "pp")), ""]
    beside = [run for run in runs if run.option]
    if beside:
        lines += [
            "## With other options",
            "",
            f"On {OPTIONS_RANKS} ranks, a degree of 2 beside data parallelism, models in turn.",
            "",
            *_table(beside, ("option", "split", "precision"), each=("engine",)),
            "",
        ]
    bad = [run for run in runs if run.outcome != "same"]
    if bad:
        lines += ["## What is not the same", "", "| model | ranks | composition | what |", "|---|---|---|---|"]
        lines += [f"| {run.model} | {run.ranks} | {run.name} | {run.outcome}: {_describe(run)} |" for run in bad]
    return "\n".join(lines).rstrip() + "\n"


def _describe(run: ParityRun) -> str:
    if run.outcome == "failed":
        return run.where.replace("|", "\\|")
    return (
        f"loss {run.loss_difference:.1e}, norm {run.norm_difference:.1e},"
        f" parameter {run.parameter_difference:.1e} ({run.where})"
    )


def _listed(items: Iterable[str]) -> str:
    *most, last = [*items] or [""]
    return f"{', '.join(most)} and {last}" if most else last


_HEADINGS = {"activation_checkpointing": "checkpointing", "engine": "strategy"}


def _table(runs: Sequence[ParityRun], by: Sequence[str], each: Sequence[str] = ()) -> list[str]:
    """Return a line for each group of runs: how many, how many are the same, and the largest differences."""

    def group_of(run: ParityRun) -> tuple[Any, ...]:
        return tuple(getattr(run, name) for name in by)

    precisions = ["fp32", "bf16"] if not each else [""]
    figures = ["loss", "norm", "parameter"]
    heads = [_HEADINGS.get(name, name) for name in (*by, *each)]
    for precision in precisions:
        after = f", {precision}" if precision else ""
        heads += [f"same{after}", *(f"{name}{after}" for name in figures)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for key, group in groupby(sorted(runs, key=group_of), key=group_of):
        members = list(group)
        cells = [str(value) for value in key]
        cells += [", ".join(sorted({getattr(run, name) for run in members})) for name in each]
        for precision in precisions:
            own = [run for run in members if precision in ("", run.precision)]
            same = [run for run in own if run.outcome == "same"]
            cells.append(f"{len(same)} of {len(own)}" if own else "")
            worst = [max(getattr(run, f"{name}_difference") for run in same) if same else None for name in figures]
            cells += ["" if value is None else f"{value:.0e}" for value in worst]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# The command.


class Rows:
    """The rows of the file, which is replaced now and then as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = {row.key: row for row in read_rows(ParityRun, path)} if path.exists() else {}
        self._written = time.monotonic()

    def __iter__(self) -> Iterator[ParityRun]:
        return iter(self._rows.values())

    def is_done(self, row: ParityRun, *, by_any_code: bool = False) -> bool:
        """Return whether this code has trained it to the same end."""
        kept = self._rows.get(row.key)
        return kept is not None and kept.outcome == "same" and (by_any_code or kept.code == code_digest())

    def add(self, row: ParityRun) -> None:
        """Put a row in place of an older one; all are written now and then."""
        self._rows[row.key] = row
        if time.monotonic() - self._written > WRITE_SECONDS:
            self.write()

    def drop(self, model: str, ranks: int, precision: str, others_than: Iterable[ParityRun]) -> None:
        """Forget what is no longer trained: of other versions, or no longer runnable."""
        stay = {row.key for row in others_than}
        about = (model, ranks, precision)
        self._rows = {
            key: row
            for key, row in self._rows.items()
            if key in stay or (row.model, row.ranks, "fp32" if row.option else row.precision) != about
        }

    def left(self) -> int:
        """Return how many of all compositions have no row."""
        everything = product(MODELS, RANKS, PRECISIONS)
        keys = {row_of(about[0], plan).key for about in everything for plan in plans_of(*about)}
        return len(keys - self._rows.keys())

    def write(self) -> None:
        """Write the rows."""
        write_rows(ParityRun, self.path, sorted(self, key=_order))
        self._written = time.monotonic()


def _order(row: ParityRun) -> tuple[Any, ...]:
    return row.model, row.ranks, row.precision, row.option, row.tp, row.pp, row.cp, row.ep, row.name


def measure(wanted: Sequence[tuple[str, int, Plan]], console: Console, *, reports: bool = False) -> Iterator[ParityRun]:
    """Measure every composition, row by row, under a bar of how many are left.

    What ranks say of failures is shown where `reports` are asked for.
    """
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    order = sorted(wanted, key=lambda item: (item[1], item[2].configuration.backend == "deepspeed"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("parity", total=len(wanted))

        def tell(text: str) -> None:
            progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

        for number, group in groupby(order, key=lambda item: item[1]):
            with Ranks(number) as ranks:
                for model, _, plan in group:
                    progress.update(task, description=f"{model} on {number}")
                    run = measured(model, plan, ranks, tell if reports else lambda text: None)
                    yield run
                    progress.advance(task)
                    differences = (
                        f"loss {run.loss_difference:.1e}, norm {run.norm_difference:.1e}, parameter"
                        f" {run.parameter_difference:.1e}, drift {run.drift:.1e} {run.where}"
                    )
                    tell(f"{model} {number}: {run.name}: {run.outcome}, {differences}")


def main() -> None:
    """Train the compositions that are missing and write rows and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, choices=RANKS, default=list(RANKS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--only", default="", metavar="TEXT", help="compositions whose names hold this")
    parser.add_argument("--list", action="store_true", help="name the compositions and train none")
    parser.add_argument("--every", action="store_true", help="on many ranks too, no schedule or precision in turn")
    parser.add_argument("--resume", action="store_true", help="leave out what this code has trained to the same end")
    parser.add_argument("--missing", action="store_true", help="leave out what any code has trained to the same end")
    parser.add_argument("--reports", action="store_true", help="print what every rank says of a failure")
    options = parser.parse_args()
    rows, wanted = Rows(ROWS), list[tuple[str, int, Plan]]()
    for ranks, model, precision in product(options.ranks, options.models, options.precisions):
        compositions = [(row_of(model, plan), plan) for plan in plans_of(model, ranks, precision, every=options.every)]
        rows.drop(model, ranks, precision, [row for row, _ in compositions])
        compositions = [(row, plan) for row, plan in compositions if options.only in row.name]
        if options.list:
            print(*(f"{model} {ranks}: {row.name}" for row, _ in compositions), sep="\n")
        is_left_out = options.resume or options.missing
        wanted += [
            (model, ranks, plan)
            for row, plan in compositions
            if not (is_left_out and rows.is_done(row, by_any_code=options.missing))
        ]
    if options.list:
        return
    if not wanted:
        print("parity: nothing is left to train")
        return
    failed = 0
    try:
        for run in measure(wanted, Console(stderr=True), reports=options.reports):
            rows.add(run)
            failed += run.outcome != "same"
    finally:
        rows.write()
        replace_text(PAGE, page(sorted(rows, key=_order), left=rows.left()))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
