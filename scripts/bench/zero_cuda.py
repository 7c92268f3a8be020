"""Our own ZeRO on one GPU beside plain torch and DeepSpeed: seconds of a step, and peaks beside the planner's.

    python -m scripts.bench.zero --device cuda            # everything below in one call, less than ten minutes
    python -m scripts.bench.zero_cuda --only native single      # some backends alone
    python -m scripts.bench.zero_cuda --device cpu --model gpt2-14m --length 64

On one rank ZeRO shards nothing: what is measured is that its hooks, casts and steps cost nothing beside plain torch
with fused AdamW, and what offloading costs. `masters` is that plain loop, with bf16 weights and fp32 masters as ZeRO
has them; `single` is autocast over fp32 weights.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from dsplan.diagnostics.bench.training import build_model
from hardware_db.files import replace_text
from hardware_db.measured_rows import SHIPPED
from hardware_db.probe import probe
from hardware_db.probe.cgroup import usable_cores
from planner.search.estimate import estimate
from planner.types.plan_io import plan_to_dict
from scripts.measure.measured_run import Subject, TimedStep, text_batches, time_subject
from scripts.measure.memory_grid import FULL, Case
from scripts.measure.memory_rows import question
from scripts.measure.time_grid import MODELS

CONFIGS: Mapping[str, Mapping[str, Any]] = {**FULL, **MODELS}
Run = tuple[str, str, Mapping[str, Any]]
RUNS: tuple[Run, ...] = (
    ("single", "torch", {}),
    ("masters", "torch", {}),
    ("zero1", "native", {}),
    ("zero2", "native", {}),
    ("zero3", "native", {}),
    ("zero1", "deepspeed", {}),
    ("zero3", "deepspeed", {}),
    ("zero2", "native", {"offload": "optimizer"}),
    ("zero2", "deepspeed", {"offload": "optimizer"}),
    ("zero2", "native", {"offload": "optimizer", "offload_ratio": 0.5}),
    ("zero3", "native", {"offload": "all"}),
    ("zero3", "deepspeed", {"offload": "all"}),
)
"""Strategy, backend, and what else the configuration says; the most telling first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run: seconds are medians over `steps` steps, `predicted_bytes` the planner's peak (0 where it knows none)."""

    device: str
    model: str
    strategy: str
    backend: str
    offload: str
    offload_ratio: float
    micro_batch: int
    length: int
    steps: int
    step_seconds: float
    fastest_seconds: float
    slowest_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    loss: float
    peak_bytes: int
    predicted_bytes: int


@dataclass(kw_only=True, slots=True)
class Turns:
    """Results that the turns of one run have given so far."""

    strategy: str
    backend: str
    how: Mapping[str, Any]
    subject: Subject
    steps: list[TimedStep] = field(default_factory=list)
    peak_bytes: int = 0
    problem: str = ""


def main() -> None:
    """Time the engines on a GPU in turns and write their rows."""
    arguments = _arguments()
    deadline = time.monotonic() + 60 * arguments.minutes
    device = probe().gpus[0].name if arguments.device == "cuda" else "cpu"
    chosen = [run for run in RUNS if not arguments.only or run[1] in arguments.only or run[0] in arguments.only]
    runs = [turns_of(run, device, arguments) for run in chosen]
    longest = 0.0
    with _pool(arguments.device) as ours, _pool(arguments.device) as theirs:
        for run in runs * arguments.turns:
            began = time.monotonic()
            if not run.problem and began + longest < deadline:
                _take(run, theirs if run.backend == "deepspeed" else ours, arguments.steps)
                longest = max(longest, time.monotonic() - began)
    rows = [_row(run, device, arguments) for run in runs if run.steps]
    print("\n".join(table(rows)))
    if arguments.out:
        _write(arguments.out, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="llama-1.2b", choices=list(CONFIGS))
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these strategies or backends alone")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each turn")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run begins that would not end by then")
    parser.add_argument("--out", type=Path, help=f"a CSV file for the rows, {SHIPPED.name}/zero_gpu.csv say")
    return parser.parse_args()


def _pool(device: str) -> RankPool:
    variables = {"LOCAL_RANK": "0"} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return RankPool(1, timeout_seconds=300.0, variables=variables)


def turns_of(run: Run, device: str, size: argparse.Namespace) -> Turns:
    """Prepare a run before its first turn; `size` has the model, the micro-batch and the length."""
    strategy, backend, how = run
    case = Case(
        model=size.model,
        config=CONFIGS[size.model],
        strategy="single" if backend == "torch" else strategy,  # type: ignore[arg-type]
        micro_batch=size.micro_batch,
        length=size.length,
        precision="bf16",
        optimizer="adamw-fused",
    )
    request, configuration = question(case, device)
    plan = estimate(request, replace(configuration, backend=backend, **how))  # type: ignore[arg-type]
    subject = Subject(config=case.model_config, task="causal-lm", plan=plan_to_dict(plan))
    return Turns(strategy=strategy, backend=backend, how=how, subject=subject)


def _take(run: Turns, pool: RankPool, steps: int) -> None:
    """One turn of a run; one that failed has no other."""
    body = train_with_masters if run.strategy == "masters" else time_subject
    try:
        turns, peak = pool.run(with_peak, body, run.subject, steps)[0]
    except RankError as problem:
        run.problem = str(problem)
        print(f"{run.strategy} {run.backend} {dict(run.how)}: {run.problem[:3000]}", file=sys.stderr, flush=True)
        return
    run.steps += turns
    run.peak_bytes = max(run.peak_bytes, peak)


def with_peak(body: Any, subject: Subject, steps: int) -> tuple[tuple[TimedStep, ...], int]:
    """Return what a body returns, and the most bytes that its tensors took on the GPU; called in a rank."""
    gc.collect()
    on_gpu, before = torch.cuda.is_available(), 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # what an earlier run left behind
    result = body(subject, steps, usable_cores())
    return result, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def train_with_masters(subject: Subject, steps: int, threads: int) -> tuple[TimedStep, ...]:
    """Train by the plain loop: bf16 weights, fp32 masters that torch's fused AdamW steps, no engine around them."""
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = subject.plan["plan"]
    model = build_model(subject.config, subject.task, chosen["attention"], device)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True)
    size = chosen["micro_batch_size"], chosen["sequence_length"]
    batches = text_batches(subject.config["vocab_size"], *size, seed=0, device=device)
    return tuple(_masters_step(model, weights, masters, optimizer, batches) for _ in range(2 + steps))[2:]


def _masters_step(
    model: Any, weights: list[Any], masters: list[Any], optimizer: torch.optim.Optimizer, batches: Iterator[Any]
) -> TimedStep:
    marks = [time.perf_counter()]
    loss = model(**next(batches)).loss
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    for weight, master in zip(weights, masters, strict=True):
        master.grad, weight.grad = weight.grad.float(), None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_copy_(weights, masters)
    mean = float(loss.detach())  # waits for the device
    forward, backward = marks[1] - marks[0], marks[2] - marks[1]
    seconds = time.perf_counter() - marks[0]
    return TimedStep(
        step=seconds, forward=forward, backward=backward, optimizer=seconds - forward - backward, loss=mean
    )


def _row(run: Turns, device: str, arguments: argparse.Namespace) -> Row:
    seconds = sorted(step.step for step in run.steps)
    parts = {
        f"{name}_seconds": round(statistics.median(getattr(step, name) for step in run.steps), 6)
        for name in ("forward", "backward", "optimizer")
    }
    planned = run.subject.plan["memory"]["peak_allocated_bytes"]
    return Row(
        device=device,
        model=arguments.model,
        strategy=run.strategy,
        backend=run.backend,
        offload=run.how.get("offload", "none"),
        offload_ratio=run.how.get("offload_ratio", 1.0),
        micro_batch=arguments.micro_batch,
        length=arguments.length,
        steps=len(seconds),
        step_seconds=round(statistics.median(seconds), 6),
        fastest_seconds=round(seconds[0], 6),
        slowest_seconds=round(seconds[-1], 6),
        loss=round(run.steps[-1].loss, 4),
        peak_bytes=run.peak_bytes,
        predicted_bytes=0 if run.strategy == "masters" else planned,
        **parts,
    )


def table(rows: list[Row]) -> Iterator[str]:
    """Markdown: seconds over those of the plain loops, and peaks over the planner's."""
    plain = {row.strategy: row.step_seconds for row in rows if row.backend == "torch"}
    yield "| strategy | backend | offload | step | / masters | / single | optimizer | loss | peak | / predicted |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        offload = row.offload if row.offload_ratio == 1.0 else f"{row.offload} {row.offload_ratio:.0%}"
        ratios = [f"{row.step_seconds / plain[name]:.3f}" if name in plain else "-" for name in ("masters", "single")]
        peak = f"{row.peak_bytes / row.predicted_bytes:.3f}" if row.predicted_bytes else "-"
        cells = [row.strategy, row.backend, offload, f"{1e3 * row.step_seconds:.1f} ms", *ratios]
        cells += [f"{1e3 * row.optimizer_seconds:.1f} ms", f"{row.loss:.3f}", f"{row.peak_bytes / 1e9:.2f} GB", peak]
        yield "| " + " | ".join(cells) + " |"


def _write(path: Path, rows: list[Row]) -> None:
    lines = [[item.name for item in fields(Row)], *(list(asdict(row).values()) for row in rows)]
    replace_text(path, "".join(f"{','.join(map(str, line))}\n" for line in lines))


if __name__ == "__main__":
    main()
