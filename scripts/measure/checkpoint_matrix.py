"""Saves a checkpoint under every composition, loads each under every other, and compares the losses that follow.

    python -m scripts.measure.checkpoint_matrix [--models llama mixtral adapters]

A small LLaMA with tied embeddings and, for expert parallelism, a small Mixtral are trained for two steps of AdamW under
each composition and saved; every composition then loads every checkpoint and trains three steps more, whose losses have
to be those of one process that never stopped. Each checkpoint is exported too, and loaded by transformers'
`from_pretrained`. Of the LLaMA with LoRA adapters, which alone are trained, each composition saves two: with the frozen
weights and without; its exports are loaded by `PeftModel.from_pretrained`. docs/reference/checkpoint-matrix.md is
written from what came out; the status is 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from dsplan.diagnostics.bench.training import build_model
from hardware_db.files import replace_text
from planner.errors import DsplanError
from planner.search.estimate import estimate
from planner.types.plan import Configuration, Plan
from scripts.generate.generated import REFERENCE
from scripts.measure.parity import LENGTH, MODELS, question
from strategies.checkpoint.export import export_checkpoint
from strategies.engine.initialize import initialize

PAGE = REFERENCE / "checkpoint-matrix.md"
SAVED_AFTER, FOLLOWING, GLOBAL_BATCH = 2, 3, 12
TOLERANCE = 2e-6
"""What losses may be apart, as a share: sums over ranks are made in another order."""
ADAPTERS = "adapters"
_METHOD = {"method": "lora", "lora_rank": 4, "lora_targets": "all-linear"}
_FAMILIES = {ADAPTERS: "llama"}
"""What the model of a matrix is, where its name is another."""
EXPORT_TOLERANCES: Mapping[str, float] = {"fp32": 2e-6, "bf16": 2e-3}
"""The same of the loss of an exported model, by the dtype of its weights."""


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
    sequence_parallel: bool = False
    pp_schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        """In a few words."""
        data = self.dp_replicate * self.dp_shard
        degrees = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        name = " x ".join([f"{self.strategy} {data}" if data > 1 else self.strategy, *degrees])
        named = ("sp",) * self.sequence_parallel + (self.pp_schedule,) * (self.pp_schedule != "1f1b")
        return ", ".join([name, *named])

    def plan(self, model: str) -> Plan:
        """Return the plan of a training with it."""
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
            sequence_parallel=self.sequence_parallel,
            pp_schedule=self.pp_schedule,  # type: ignore[arg-type]
            virtual_stages=2 if self.pp_schedule == "interleaved" else 1,
            micro_batch_size=GLOBAL_BATCH // data // micro_batches,
            gradient_accumulation_steps=micro_batches,
            global_batch_size=GLOBAL_BATCH,
            sequence_length=LENGTH,
            precision="fp32",
            optimizer="adamw",
        )
        plan = estimate(question(_family(model), self.ranks, "fp32"), configuration)
        return replace(plan, workload={**plan.workload, **_METHOD}) if model == ADAPTERS else plan


COMPOSITIONS: Mapping[str, Sequence[Composition]] = {
    "llama": (
        Composition(strategy="single"),
        Composition(strategy="ddp", dp_replicate=2),
        Composition(strategy="fsdp", dp_shard=3),
        Composition(strategy="hsdp", dp_replicate=2, dp_shard=2),
        Composition(strategy="zero1", dp_shard=2),
        Composition(strategy="zero2", dp_shard=2),
        Composition(strategy="zero3", dp_shard=2),
        Composition(strategy="fsdp", dp_shard=2, tp=2),
        Composition(strategy="ddp", dp_replicate=2, tp=2, sequence_parallel=True),
        Composition(strategy="zero2", dp_shard=2, tp=2),
        Composition(strategy="fsdp", dp_shard=2, pp=2),
        Composition(strategy="ddp", tp=2, pp=2),
        Composition(strategy="zero1", dp_shard=2, pp=2, pp_schedule="interleaved"),
        Composition(strategy="fsdp", dp_shard=2, cp=2),
        Composition(strategy="ddp", pp=2, cp=2),
    ),
    "mixtral": (
        Composition(strategy="single"),
        Composition(strategy="fsdp", dp_shard=3),
        Composition(strategy="zero2", dp_shard=2),
        Composition(strategy="fsdp", dp_shard=2, tp=2),
        Composition(strategy="ddp", tp=2, pp=2),
        Composition(strategy="fsdp", dp_shard=2, ep=2),
        Composition(strategy="hsdp", dp_replicate=2, dp_shard=2, ep=2),
        Composition(strategy="fsdp", dp_shard=2, cp=2, ep=2),
        Composition(strategy="fsdp", dp_shard=2, pp=2, ep=2),
    ),
    ADAPTERS: (
        Composition(strategy="single"),
        Composition(strategy="ddp", dp_replicate=2),
        Composition(strategy="fsdp", dp_shard=3),
        Composition(strategy="fsdp", dp_shard=4),
        Composition(strategy="zero3", dp_shard=2),
        Composition(strategy="fsdp", dp_shard=2, tp=2),
        Composition(strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True),
        Composition(strategy="zero2", dp_shard=2, tp=2),
        Composition(strategy="ddp", dp_replicate=2, pp=2),
        Composition(strategy="fsdp", tp=2, pp=2),
    ),
}


def _family(model: str) -> str:
    return _FAMILIES.get(model, model)


def samples_of(step: int) -> torch.Tensor:
    """Return the global batch of a step, [samples, length]."""
    return torch.randint(0, 128, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def start_engine(model: str, plan: Plan) -> Any:
    """Return an engine that begins with the weights that all begin with."""
    module, adapts = base_of(model), model == ADAPTERS
    torch.manual_seed(1)  # of the adapters that are put in
    engine, *_ = initialize(
        module,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-2 if adapts else 3e-3),
        plan=plan,
        config={"gradient_clipping": 1.0},
    )
    return engine


def base_of(model: str) -> nn.Module:
    """Return the model of a matrix before it is trained, the same in every process."""
    return build_model(MODELS[_family(model)], "causal-lm", "sdpa", torch.device("cpu"))


def losses_of(engine: Any, first: int, count: int) -> list[float]:
    """Return the losses of steps over the global batch."""
    losses = []
    for step in range(first, first + count):
        own = samples_of(step).chunk(engine.data_parallel_size)[engine.data_parallel_rank]
        losses.append(float(engine.train_batch({"input_ids": own, "labels": own})))
    return losses


def save_after(model: str, plan: Plan, directory: str) -> list[float]:
    """Train, save, and the losses of the steps that follow."""
    engine = start_engine(model, plan)
    losses_of(engine, 0, SAVED_AFTER)
    engine.save_checkpoint(directory, client_state={"at": SAVED_AFTER})
    if model == ADAPTERS:
        engine.save_checkpoint(alone(directory), trainable_only=True)
        engine.export_checkpoint(f"{directory}-export")
    return losses_of(engine, SAVED_AFTER, FOLLOWING)


def alone(directory: str) -> str:
    """Return where adapters are saved without what they were trained beside."""
    return f"{directory}-alone"


def resume_each(model: str, plan: Plan, directories: Sequence[str]) -> list[list[float]]:
    """Return the losses of the steps that follow each checkpoint, all loaded by one engine."""
    engine, losses = start_engine(model, plan), []
    for directory in directories:
        engine.load_checkpoint(directory)
        losses.append(losses_of(engine, SAVED_AFTER, FOLLOWING))
    return losses


def without_moments(model: str, plan: Plan, directory: str) -> list[float]:
    """Return the losses that follow where AdamW begins anew: what a checkpoint without its moments would show."""
    engine = start_engine(model, plan)
    engine.load_checkpoint(directory)
    engine.optimizer.state.clear()
    return losses_of(engine, SAVED_AFTER, FOLLOWING)


def exported(directory: str, dtype: str) -> float:
    """Return the loss of the first step that follows, of what transformers loads from an export."""
    transformers: Any = import_module("transformers")
    to = Path(directory).with_suffix(f".{dtype}")
    export_checkpoint(directory, to, dtype=dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(to, dtype="auto").float()
    tokens = samples_of(SAVED_AFTER)
    with torch.no_grad():
        return float(loaded(input_ids=tokens, labels=tokens).loss)


def loaded_by_peft(directory: str) -> tuple[float, torch.Tensor]:
    """Return loss and logits of the first step that follows, of what PEFT loads from an export over the base."""
    peft: Any = import_module("peft")
    loaded = peft.PeftModel.from_pretrained(base_of(ADAPTERS), f"{directory}-export")
    tokens = samples_of(SAVED_AFTER)
    with torch.no_grad():
        output = loaded(input_ids=tokens, labels=tokens)
    return float(output.loss), output.logits


def run(composition: Composition, function: Any, *arguments: Any) -> Any:
    """Return what a function gives on rank 0 of ranks started for it: every engine leaves process groups behind."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DSPLAN_QUIET": "1"}
    with RankPool(composition.ranks, timeout_seconds=120.0, variables=variables) as pool:
        return pool.run(function, *arguments)[0]


Cells = dict[tuple[str, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The outcome of each pair of a writer and a reader: the largest difference of a loss, as a share, or what failed.

    The last readers are transformers, or PEFT.
    """

    cells: Cells
    without_moments: float
    """How far losses would be apart where the optimizer's moments were lost."""

    @property
    def is_right(self) -> bool:
        """Return whether every pair agrees, and would not where moments are lost."""
        return self.without_moments > TOLERANCE and not any(
            cell.startswith("**") or ("e-" not in cell and cell != "0e+00") for cell in self.cells.values()
        )


def measure(model: str, compositions: Sequence[Composition], top: Path) -> Matrix:
    """Save under each composition, load under each."""
    cells, right = Cells(), list[float]()
    folders: dict[str, str] = {}
    for writer in compositions:
        folder = str(top / f"{model}-{len(folders)}")
        try:
            losses = run(writer, save_after, model, writer.plan(model), folder)
        except (RankError, DsplanError) as problem:
            print(f"{model}: {writer.name} cannot save: {first_line(problem)}", flush=True)
            cells |= {(writer.name, reader.name): first_line(problem) for reader in compositions}
            continue
        right = right or losses
        folders[writer.name] = folder
        print(f"{model}: {writer.name} saved; apart from one process {apart(losses, right):.1e}", flush=True)
    first = compositions[0]
    lost = apart(run(first, without_moments, model, first.plan(model), folders[first.name]), right)
    exports = dict(folders)
    if model == ADAPTERS:
        folders |= {f"{name}, adapters alone": alone(folder) for name, folder in exports.items()}
    print(f"{model}: losses without the optimizer's moments would be {lost:.1e} apart", flush=True)
    for reader in compositions:
        try:
            resumed = run(reader, resume_each, model, reader.plan(model), list(folders.values()))
        except (RankError, DsplanError) as problem:
            cells |= {(writer, reader.name): first_line(problem) for writer in folders}
            print(f"{model}: {reader.name} cannot load: {first_line(problem)}", flush=True)
            continue
        for writer, losses in zip(folders, resumed, strict=True):
            cells[writer, reader.name] = _cell(apart(losses, right), TOLERANCE)
        print(f"{model}: {reader.name} loaded {' '.join(cells[writer, reader.name] for writer in folders)}", flush=True)
    if model == ADAPTERS:
        loaded = {name: loaded_by_peft(folder) for name, folder in exports.items()}
        expected = loaded[first.name][1]
        for name, (loss, logits) in loaded.items():
            logits_apart = float((logits - expected).abs().max() / expected.abs().max())
            cells[name, "PeftModel.from_pretrained"] = _cell(max(apart([loss], right[:1]), logits_apart), TOLERANCE)
        return Matrix(cells=cells, without_moments=lost)
    for dtype, tolerance in EXPORT_TOLERANCES.items():
        for name, folder in exports.items():
            difference = apart([exported(folder, dtype)], right[:1])
            cells[name, f"from_pretrained, {dtype}"] = _cell(difference, tolerance)
    return Matrix(cells=cells, without_moments=lost)


def _cell(difference: float, tolerance: float) -> str:
    return f"{difference:.0e}" if difference <= tolerance else f"**{difference:.1e}**"


def apart(losses: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference of a loss, as a share."""
    return max(abs(loss / expected - 1) for loss, expected in zip(losses, right, strict=True))


def first_line(problem: Exception) -> str:
    """Return what the first rank said."""
    reports = list(problem.reports.values()) if isinstance(problem, RankError) else [str(problem)]
    return ((reports or [""])[0].strip().splitlines() or [type(problem).__name__])[0][:160]


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of a page below each model's heading, which stay where it is not measured again."""
    parts = text.rpartition("\n\ntorch ")[0].split("\n## ")[1:]
    return {lines[0]: lines[2:] for lines in (part.splitlines() for part in parts)}


def page(matrices: Mapping[str, Matrix], before: Mapping[str, list[str]]) -> str:
    """Return the page of all pairs, with what it says already of models that were not measured."""
    lines = [
        "# Checkpoints from every composition to every other",
        "",
        "Written by `python -m scripts.measure.checkpoint_matrix`. A small model of four blocks is trained for"
        f" {SAVED_AFTER} steps of AdamW, clipped by the global norm, under the composition of a row and saved, and"
        f" resumed under that of a column. A cell is the largest difference of the next {FOLLOWING} losses from those"
        f" of one process that never stopped, as a share; more than {TOLERANCE:g} would be bold. The last columns are"
        " the loss of what"
        " transformers' `from_pretrained` loads from `export_checkpoint` with weights of a dtype"
        f" (bold above {EXPORT_TOLERANCES['bf16']:g} in bf16).",
        "",
        "Of `adapters`, a llama beside whose frozen linear layers LoRA adapters are trained, each composition saves two"
        " checkpoints, with the frozen weights and without (`trainable_only`). The last column is of what"
        " `PeftModel.from_pretrained` loads from `engine.export_checkpoint`: the larger of the difference of its loss"
        " and that of its logits from those of the first row's export.",
    ]
    for model in COMPOSITIONS:
        lines += ["", f"## {model}", ""]
        matrix = matrices.get(model)
        if matrix is None:
            lines += before[model]
            continue
        cells = matrix.cells
        readers = list(dict.fromkeys(reader for _, reader in cells))
        lines += [f"Without the moments of AdamW losses would be {matrix.without_moments:.0e} apart."]
        lines += ["", f"| saved under | {' | '.join(readers)} |", f"|---|{'---|' * len(readers)}"]
        for writer in dict.fromkeys(writer for writer, _ in cells):
            lines.append(f"| {writer} | {' | '.join(cells.get((writer, reader), '') for reader in readers)} |")
    lines += ["", f"torch {version('torch')}, transformers {version('transformers')}, gloo on a CPU."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the pairs and write their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=sorted(COMPOSITIONS), default=list(COMPOSITIONS))
    options = parser.parse_args()
    matrices: dict[str, Matrix] = {}
    with tempfile.TemporaryDirectory() as top:
        for model in options.models:
            matrices[model] = measure(model, COMPOSITIONS[model], Path(top))
    before = sections(PAGE.read_text())
    if {*matrices, *before} == set(COMPOSITIONS):
        replace_text(PAGE, page(matrices, before))
    sys.exit(not all(matrix.is_right for matrix in matrices.values()))


if __name__ == "__main__":
    main()
