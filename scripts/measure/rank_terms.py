"""Measures steps with adapters, split models and pipeline stages on real CPU ranks, beside the traces of `trace_terms`.

    python -m scripts.measure.rank_terms [TERM ...] [--again]

Ranks talk over gloo; live bytes are counted as `scripts.measure.memory` counts them. Rows go to
hardware_db/measurements/memory_terms.csv with the device `cpu`. Context parallelism is not among them: torch's has no
kernel for CPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hardware_db.spawn import RankError, RankPool
from planner.search.estimate import price
from scripts.measure.term_rows import TERMS, TermRun, key_of, question, read_term_runs, write_term_runs
from scripts.measure.trace_terms import case_of, line_of
from strategies.bench.measured_run import PHASES, StepMemory, build_model, measure_step
from strategies.distributed.environment import join
from strategies.distributed.gloo import quiet
from strategies.engine.base import Engine
from strategies.parallel.blocks import repeated_blocks
from strategies.tracing.step.build import Subject, with_adapters
from strategies.tracing.step.checkpointing import checkpoint_activations
from strategies.tracing.step.methods import compute_loss_as, make_optimizer
from strategies.tracing.step.parallel import shard
from strategies.tracing.step.split import Chunk, actions, split_weights

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
RUN_SECONDS = 60.0


def grid() -> Iterator[TermRun]:
    """Every case."""
    for tp in (2, 4):
        for checkpointing in ("none", "full"):
            yield _case("tp", tp=tp, activation_checkpointing=checkpointing)
            yield _case("sp", tp=tp, sequence_parallel=True, activation_checkpointing=checkpointing)
    for schedule in ("1f1b", "gpipe"):
        yield _case(f"stages {schedule}", pp=2, pp_schedule=schedule, micro_batch_size=2, gradient_accumulation_steps=8)
    for strategy in ("single", "ddp", "fsdp"):
        degrees = {"ddp": {"dp_replicate": 2}, "fsdp": {"dp_shard": 2}}.get(strategy, {})
        yield _case(
            "lora", method="lora", lora_rank=8, lora_targets="all-linear", strategy=strategy, load_dtype="fp32",
            peft=version("peft"), **degrees,
        )  # fmt: skip
    for loss in ("fused", "chunked"):
        yield _case(f"{loss} loss", loss=loss)


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
    """A step of the case on this rank."""
    run = TermRun(**fields)
    device = join().device
    torch.manual_seed(0)
    model = build_model(run.model_config, "causal-lm", "sdpa", device)
    job = price(*question(run)).job
    if run.pp > 1:
        return _pipeline(run, model)
    if run.method != "full":
        from planner.models.from_hf.config import facts_from_config

        subject = Subject(
            facts=facts_from_config(run.model_config, run.model),
            config=cast("Any", model).config,
            module=model,
            blocks=tuple(repeated_blocks(model)),
        )
        model = with_adapters(subject, job.counts, job.workload).module
        for name, part in list(model.named_parameters()):
            if part.is_meta:
                _fill(model, name)
    compute_loss_as(model, job.workload.loss)
    checkpoint_activations(model, run.activation_checkpointing)
    whole: nn.Module = model
    names = ("dp_replicate", "dp_shard_cp", "tp")
    mesh = init_device_mesh("cpu", (run.dp_replicate, run.dp_shard, run.tp), mesh_dim_names=names)
    if run.tp > 1:
        split_weights(model, mesh["tp"], sequence_parallel=run.sequence_parallel)
    if run.strategy == "fsdp":
        shard(model, repeated_blocks(model), mesh, job.configuration)
    if run.strategy == "ddp":
        whole = nn.parallel.DistributedDataParallel(model)
    ids = torch.randint(run.model_config["vocab_size"], (run.micro_batch_size, run.sequence_length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if run.sequence_parallel:
        batch["position_ids"] = torch.arange(run.sequence_length)[None]
    return measure_step(cast("Engine", _Loop(run, model, whole)), batch)


def _fill(model: nn.Module, name: str) -> None:
    """Give an adapter, which is made on the meta device, memory."""
    owner, _, last = name.rpartition(".")
    weight = model.get_parameter(name)
    setattr(model.get_submodule(owner), last, nn.Parameter(torch.zeros_like(weight, device="cpu")))


class _StageLoop(_Loop):
    """A rank of a pipeline as an engine: all of a step's micro-batches are its forward."""

    def __init__(self, run: TermRun, chunk: Chunk, batch: Mapping[str, torch.Tensor]) -> None:
        super().__init__(run, chunk, chunk)
        self._run, self._chunk, self._batch = run, chunk, batch
        # One call is a whole step.
        once = replace(self.configuration, gradient_accumulation_steps=1, global_batch_size=run.micro_batch_size)
        self.configuration = once

    def __call__(self, **_batch: Any) -> Any:
        run, rank = self._run, dist.get_rank()
        steps = run.gradient_accumulation_steps
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sending: list[tuple[Any, torch.Tensor]] = []
        schedule: Any = run.pp_schedule
        for action, _, index in actions(schedule, pp=run.pp, rank=rank, chunks=1, micro_batches=steps):
            sending = [(request, sent) for request, sent in sending if not request.is_completed()]
            if action == "forward":
                given = self._received(rank)
                made = self._chunk(given, self._batch["labels"])
                kept[index] = given, made / steps if self._chunk.is_last else made
                if not self._chunk.is_last:
                    sending.append((dist.isend(made.detach(), rank + 1), made.detach()))
                continue
            given, made = kept.pop(index)
            gradient = None
            if not self._chunk.is_last:
                gradient = torch.empty_like(made)
                dist.recv(gradient, rank + 1)
            torch.autograd.backward(made, gradient)
            if rank:
                sending.append((dist.isend(given.grad, rank - 1), cast("torch.Tensor", given.grad)))
            del given, made, gradient
        for request, _ in sending:
            request.wait()
        return _Made()

    def _received(self, rank: int) -> torch.Tensor:
        if rank == 0:
            return self._batch["input_ids"]
        run = self._run
        states = torch.empty(run.micro_batch_size, run.sequence_length, run.model_config["hidden_size"])
        dist.recv(states, rank - 1)
        return states.requires_grad_()

    def backward(self, loss: torch.Tensor) -> None:
        pass


class _Made:
    loss = torch.zeros(())


def _pipeline(run: TermRun, model: nn.Module) -> StepMemory:
    rank, each = dist.get_rank(), run.model_config["num_hidden_layers"] // run.pp
    blocks = range(rank * each, (rank + 1) * each)
    chunk = Chunk(model, blocks, is_first=rank == 0, is_last=rank == run.pp - 1)
    ids = torch.randint(run.model_config["vocab_size"], (run.micro_batch_size, run.sequence_length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return measure_step(cast("Engine", _StageLoop(run, chunk, batch)), batch)


def measure(case: TermRun) -> TermRun:
    """The row of a case: peaks of the busiest rank, and of every stage."""
    ranks = case.dp_replicate * case.dp_shard * case.tp * case.pp
    pool = RankPool(ranks, timeout_seconds=RUN_SECONDS, variables={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    with pool:
        if case.pp == 1:  # its barriers would wait for stages that have nothing to send
            quiet(pool)
        try:
            found: list[StepMemory] = pool.run(measured_here, asdict(case))
        except RankError as problem:
            print(str(problem)[-1500:], flush=True)
            return replace(case, outcome="failed")
    phases = {name: max(step.phases[name] for step in found) for name in PHASES}
    seen = phases if case.pp == 1 else {"step": phases["step"]}  # a pipeline has no one forward or backward
    return replace(
        case,
        **{f"{name}_bytes": size for name, size in seen.items()},
        peak_allocated_bytes=max(phases.values()),
        stages_bytes=" ".join(str(step.peak_bytes) for step in found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("terms", nargs="*", metavar="TERM")
    parser.add_argument("--again", action="store_true", help="measure anew what has a row")
    arguments = parser.parse_args()
    terms = set(arguments.terms or TERMS)
    for case in grid():
        known = {key_of(run): run for run in read_term_runs()}
        if case.term in terms and (arguments.again or key_of(case) not in known):
            run = measure(case)
            write_term_runs({**known, key_of(run): run}.values())
            print(line_of(run), flush=True)


if __name__ == "__main__":
    main()
