"""Measures steps with adapters, split models and pipeline stages on real CPU ranks, beside the traces of `trace_terms`.

    python -m scripts.measure.rank_terms [TERM ...] [--again]

Ranks talk over gloo; live bytes are counted as `scripts.measure.memory` counts them. Rows go to
hardware_db/measurements/memory_terms.csv with the device `cpu`. Split models are trained by dsplan's own engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from dsplan.diagnostics.bench.training import build_model
from hardware_db.probe import probe
from planner.search.estimate import estimate, price
from planner.types.plan_io import plan_to_dict
from scripts.measure.gloo import quiet
from scripts.measure.machines import record
from scripts.measure.measured_run import PHASES, StepMemory, Subject, measure_step, measure_subject
from scripts.measure.term_rows import TERMS, TermRun, key_of, question, read_term_runs, write_term_runs
from scripts.measure.trace_terms import case_of, line_of
from strategies.distributed.environment import join
from strategies.engine.base import Engine
from strategies.parallel.blocks import repeated_blocks
from strategies.tracing.step.build import Subject as Traced
from strategies.tracing.step.build import with_adapters
from strategies.tracing.step.checkpointing import checkpoint_activations
from strategies.tracing.step.methods import compute_loss_as, make_optimizer
from strategies.tracing.step.parallel import shard

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
RUN_SECONDS = 90.0


def grid() -> Iterator[TermRun]:
    """Every case."""
    yield from _splits()
    for strategy in ("single", "ddp", "fsdp"):
        degrees = {"ddp": {"dp_replicate": 2}, "fsdp": {"dp_shard": 2}}.get(strategy, {})
        yield _case(
            "lora", method="lora", lora_rank=8, lora_targets="all-linear", strategy=strategy, load_dtype="fp32",
            peft=version("peft"), **degrees,
        )  # fmt: skip
    for loss in ("fused", "chunked"):
        yield _case(f"{loss} loss", loss=loss)


def _splits() -> Iterator[TermRun]:
    """Layers that four ranks share, by dsplan's own engine; `scripts.measure.compositions` has all other splits."""
    for term, changes in (("tp", {}), ("sp", {"sequence_parallel": True})):
        for checkpointing, degrees in product(
            ("none", "full"),
            (
                {"strategy": "ddp", "dp_replicate": 2, "tp": 2},
                {"strategy": "fsdp", "dp_shard": 2, "tp": 2},
                {"strategy": "ddp", "tp": 4},
            ),
        ):
            yield _case(term, activation_checkpointing=checkpointing, **degrees, **changes)


def _case(term: str, **chosen: Any) -> TermRun:
    base = {"model": "llama", "config": json.dumps(LLAMA), "device": "cpu", "precision": "fp32", "optimizer": "adamw"}
    return case_of(term, **{**base, "sequence_length": 256, "micro_batch_size": 8, **chosen})


class _Loop:
    """As much of an engine as a measured step calls."""

    def __init__(self, run: TermRun, module: nn.Module, whole: nn.Module) -> None:
        self.module, self._whole, self.device = module, whole, torch.device("cpu")
        self.configuration = question(run)[1]
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        kinds = ([part for part in trained if isinstance(part, DTensor) is wanted] for wanted in (True, False))
        self._optimizers = [make_optimizer(run.optimizer, part, on_cpu=True) for part in kinds if part]

    def __call__(self, **batch: Any) -> Any:
        return self._whole(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def measured_here(fields: dict[str, Any]) -> StepMemory:
    """Measure a step of the case on this rank."""
    run = TermRun(**fields)
    device = join().device
    torch.manual_seed(0)
    model = build_model(run.model_config, "causal-lm", "sdpa", device)
    job = price(*question(run)).job
    if run.method != "full":
        from planner.models.from_hf.config import facts_from_config

        subject = Traced(
            facts=facts_from_config(run.model_config, run.model),
            config=cast("Any", model).config,
            module=model,
            blocks=tuple(repeated_blocks(model)),
        )
        model = with_adapters(subject, job).module
        for name, part in list(model.named_parameters()):
            if part.is_meta:
                _fill(model, name)
    compute_loss_as(model, job.workload.loss)
    checkpoint_activations(model, run.activation_checkpointing)
    whole: nn.Module = model
    mesh = init_device_mesh("cpu", (run.dp_replicate, run.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard_cp"))
    if run.strategy == "fsdp":
        shard(model, repeated_blocks(model), mesh, job.configuration)
    if run.strategy == "ddp":
        whole = nn.parallel.DistributedDataParallel(model)
    ids = torch.randint(run.model_config["vocab_size"], (run.micro_batch_size, run.sequence_length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return measure_step(cast("Engine", _Loop(run, model, whole)), batch)


def _fill(model: nn.Module, name: str) -> None:
    """Give an adapter, which is made on the meta device, memory."""
    owner, _, last = name.rpartition(".")
    weight = model.get_parameter(name)
    setattr(model.get_submodule(owner), last, nn.Parameter(torch.zeros_like(weight, device="cpu")))


def measure(case: TermRun) -> TermRun:
    """Return the row of a case: peaks of the busiest rank, and of every stage."""
    ranks = case.dp_replicate * case.dp_shard * case.cp * case.tp * case.pp
    plan = estimate(*question(case)) if case.tp * case.pp * case.cp * case.ep > 1 else None
    if plan is not None and not plan.runnable:
        print(f"{case.term}: {plan.notes[0]}", flush=True)
        return replace(case, outcome="failed")
    pool = RankPool(ranks, timeout_seconds=RUN_SECONDS, variables={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    with pool:
        if case.pp == 1:  # one thread would wait for stages that have nothing to send
            quiet(pool)
        try:
            if plan is None:
                steps: list[StepMemory] = pool.run(measured_here, asdict(case))
            else:
                subject = Subject(config=case.model_config, task="causal-lm", plan=plan_to_dict(plan))
                steps = pool.run(measure_subject, subject)
        except RankError as problem:
            print(str(problem)[-1500:], flush=True)
            return replace(case, outcome="failed")
    phases = {name: max(step.phases[name] for step in steps) for name in PHASES}
    seen = phases if case.pp == 1 else {"step": phases["step"]}  # a pipeline has no one forward or backward
    return replace(
        case,
        **{f"{name}_bytes": size for name, size in seen.items()},
        peak_allocated_bytes=max(phases.values()),
        stages_bytes=" ".join(str(step.peak_bytes) for step in steps),
    )


def main() -> None:
    """Measure the cases that are missing and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("terms", nargs="*", metavar="TERM")
    parser.add_argument("--again", action="store_true", help="measure anew what has a row")
    arguments = parser.parse_args()
    terms = set(arguments.terms or TERMS)
    for case in grid():
        kept = {key_of(run): run for run in read_term_runs()}
        if case.term in terms and (arguments.again or key_of(case) not in kept):
            run = measure(replace(case, **record(probe())))
            write_term_runs({**kept, key_of(run): run}.values())
            print(line_of(run), flush=True)


if __name__ == "__main__":
    main()
