"""Saves a checkpoint under every composition, loads each under every other, and compares the losses that follow.

    python -m scripts.measure.checkpoint_matrix [--models llama mixtral]

A small LLaMA and, for expert parallelism, a small Mixtral are trained for two steps of AdamW under each composition and
saved; every composition then loads every checkpoint and trains two steps more, whose losses have to be those of one
process that never stopped. docs/reference/checkpoint-matrix.md is written from what came out; the status is 1 where a
loss differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardware_db.files import replace_text
from hardware_db.spawn import RankError, RankPool
from planner.cost.combinations import refusal
from planner.errors import DsplanError
from planner.search.estimate import estimate
from planner.types.plan import Configuration, Plan
from scripts.generate.generated import REFERENCE
from scripts.measure.parity import LENGTH, MODELS, question
from strategies.bench.measured_run import build_model
from strategies.engine.initialize import initialize

PAGE = REFERENCE / "checkpoint-matrix.md"
SAVED_AFTER, FOLLOWING, GLOBAL_BATCH = 2, 2, 12
TOLERANCE = 2e-5
"""What losses may be apart, as a share: sums over ranks are made in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A strategy and its degrees."""

    strategy: str
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        """In a few words."""
        data = self.dp_replicate * self.dp_shard
        degrees = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        return " x ".join([f"{self.strategy} {data}" if data > 1 else self.strategy, *degrees])

    def plan(self, model: str) -> Plan:
        """The plan of a training with it."""
        data = self.dp_replicate * self.dp_shard
        micro_batches = 2 if self.pp > 1 else 1
        configuration = Configuration(
            strategy=self.strategy,  # type: ignore[arg-type]
            backend="native" if self.strategy.startswith("zero") else "torch",
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            micro_batch_size=GLOBAL_BATCH // data // micro_batches,
            gradient_accumulation_steps=micro_batches,
            global_batch_size=GLOBAL_BATCH,
            sequence_length=LENGTH,
            precision="fp32",
            optimizer="adamw",
        )
        return estimate(question(model, self.ranks, "fp32"), configuration)


COMPOSITIONS = (
    Composition(strategy="single"),
    Composition(strategy="ddp", dp_replicate=2),
    Composition(strategy="fsdp", dp_shard=3),
    Composition(strategy="hsdp", dp_replicate=2, dp_shard=2),
    Composition(strategy="zero1", dp_shard=2),
    Composition(strategy="zero2", dp_shard=2),
    Composition(strategy="zero3", dp_shard=2),
    Composition(strategy="fsdp", dp_shard=2, tp=2),
    Composition(strategy="ddp", dp_replicate=2, tp=2),
    Composition(strategy="zero2", dp_shard=2, tp=2),
    Composition(strategy="fsdp", dp_shard=2, pp=2),
    Composition(strategy="ddp", tp=2, pp=2),
    Composition(strategy="fsdp", dp_shard=2, cp=2),
    Composition(strategy="fsdp", dp_shard=2, ep=2),
)


def samples_of(step: int) -> torch.Tensor:
    """The global batch of a step, [samples, length]."""
    return torch.randint(0, 128, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def made(model: str, plan: Plan) -> Any:
    """An engine that begins with the weights that all begin with."""
    module = build_model(MODELS[model], "causal-lm", "sdpa", torch.device("cpu"))
    engine, *_ = initialize(
        module,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        plan=plan,
        config={"gradient_clipping": 1.0},
    )
    return engine


def losses_of(engine: Any, first: int, count: int) -> list[float]:
    """The losses of steps over the global batch."""
    found = []
    for step in range(first, first + count):
        own = samples_of(step).chunk(engine.data_parallel_size)[engine.data_parallel_rank]
        found.append(float(engine.train_batch({"input_ids": own, "labels": own})))
    return found


def save_after(model: str, plan: Plan, directory: str) -> list[float]:
    """Train, save, and the losses of the steps that follow."""
    engine = made(model, plan)
    losses_of(engine, 0, SAVED_AFTER)
    engine.save_checkpoint(directory, client_state={"at": SAVED_AFTER})
    return losses_of(engine, SAVED_AFTER, FOLLOWING)


def resume_each(model: str, plan: Plan, directories: Sequence[str]) -> list[list[float]]:
    """The losses of the steps that follow each checkpoint, all loaded by one engine."""
    engine, found = made(model, plan), []
    for directory in directories:
        engine.load_checkpoint(directory)
        found.append(losses_of(engine, SAVED_AFTER, FOLLOWING))
    return found


def run(composition: Composition, function: Any, *arguments: Any) -> Any:
    """What a function gives on rank 0 of ranks that are started for it: every engine leaves process groups behind."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DSPLAN_QUIET": "1"}
    with RankPool(composition.ranks, timeout_seconds=120.0, variables=variables) as pool:
        return pool.run(function, *arguments)[0]


Cells = dict[tuple[Composition, Composition], str]


def measure(model: str, compositions: Sequence[Composition], top: Path) -> Cells:
    """What came of each pair (writer, reader): the largest difference of a loss, as a share, or what failed."""
    cells, right = Cells(), list[float]()
    folders: dict[Composition, str] = {}
    for writer in compositions:
        folder = str(top / f"{model}-{writer.name}")
        try:
            losses = run(writer, save_after, model, writer.plan(model), folder)
        except (RankError, DsplanError) as problem:
            print(f"{model}: {writer.name} cannot save: {first_line(problem)}", flush=True)
            continue
        right = right or losses
        folders[writer] = folder
        print(f"{model}: {writer.name} saved; apart from one process {apart(losses, right):.1e}", flush=True)
    for reader in compositions:
        try:
            found = run(reader, resume_each, model, reader.plan(model), list(folders.values()))
        except (RankError, DsplanError) as problem:
            cells |= {(writer, reader): first_line(problem) for writer in folders}
            print(f"{model}: {reader.name} cannot load: {first_line(problem)}", flush=True)
            continue
        for writer, losses in zip(folders, found, strict=True):
            difference = apart(losses, right)
            cells[writer, reader] = f"{difference:.0e}" if difference <= TOLERANCE else f"**{difference:.1e}**"
        print(f"{model}: {reader.name} loaded {' '.join(cells[writer, reader] for writer in folders)}", flush=True)
    return cells


def apart(losses: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference of a loss, as a share."""
    return max(abs(loss / expected - 1) for loss, expected in zip(losses, right, strict=True))


def first_line(problem: Exception) -> str:
    """What the first rank said."""
    reports = list(problem.reports.values()) if isinstance(problem, RankError) else [str(problem)]
    return ((reports or [""])[0].strip().splitlines() or [type(problem).__name__])[0][:160]


def page(matrices: Mapping[str, Cells]) -> str:
    """The page of all pairs."""
    lines = [
        "# Checkpoints from every composition to every other",
        "",
        "Written by `python -m scripts.measure.checkpoint_matrix`. A small model of four blocks is trained for"
        f" {SAVED_AFTER} steps of AdamW under the composition of a row and saved, and resumed under that of a column."
        f" A cell is the largest difference of the next {FOLLOWING} losses from those of one process that never"
        f" stopped, as a share; more than {TOLERANCE:g} would be bold.",
    ]
    for model, cells in matrices.items():
        readers = list(dict.fromkeys(reader for _, reader in cells))
        lines += ["", f"## {model}", "", f"| saved under | {' | '.join(reader.name for reader in readers)} |"]
        lines.append(f"|---|{'---|' * len(readers)}")
        for writer in dict.fromkeys(writer for writer, _ in cells):
            lines.append(f"| {writer.name} | {' | '.join(cells[writer, reader] for reader in readers)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=("llama", "mixtral"), default=["llama", "mixtral"])
    options = parser.parse_args()
    matrices: dict[str, Cells] = {}
    with tempfile.TemporaryDirectory() as top:
        for model in options.models:
            chosen = [each for each in COMPOSITIONS if each.ep == 1 or model == "mixtral"]
            runnable = [each for each in chosen if not refusal(each.plan(model).configuration)]
            for each in chosen:
                if each not in runnable:
                    print(f"{model}: {each.name}: {refusal(each.plan(model).configuration)}")
            matrices[model] = measure(model, runnable, Path(top))
    replace_text(PAGE, page(matrices))
    cells = [cell for each in matrices.values() for cell in each.values()]
    sys.exit(any(cell.startswith("**") or ("e-" not in cell and cell != "0e+00") for cell in cells))


if __name__ == "__main__":
    main()
