"""Traces whole training steps of the catalogue's models on fake tensors, for the closed forms to be compared with.

    python -m scripts.measure.traces [--only MODEL_TYPE ...] [--again]

Every trace becomes a row of hardware_db/measurements/memory_traced.csv as soon as it is done, and what has a row is
skipped. It needs torch and transformers, no GPU, and about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version

from hardware_db.measured_rows import SHIPPED, MemoryRun, read_memory_runs, write_memory_runs
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.catalogue import find_model
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Configuration
from scripts.measure.trace_grid import TraceCase, trace_grid

ROWS = SHIPPED / "memory_traced.csv"
DEVICE = "H100"


def job_of(case: TraceCase) -> Job:
    """Return the case as the cost model sees it."""
    shards = case.world_size if case.strategy.startswith("fsdp") else 1
    batch = case.micro_batch * case.accumulation * case.world_size
    cluster = resolve_cluster(HardwareRequest(gpu=DEVICE, gpus=case.world_size))
    options = WorkOptions(
        seq_len=case.length,
        global_batch=batch,
        precision=case.precision,
        optimizer=case.optimizer,
        attention=case.attention,
    )
    request = make_request(find_model(case.model), cluster, options)
    configuration = Configuration(
        strategy=case.strategy,
        backend="torch",
        dp_replicate=case.world_size // shards,
        dp_shard=shards,
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        global_batch_size=batch,
        sequence_length=case.length,
        precision=case.precision,
        optimizer=case.optimizer,
        attention=case.attention,
        activation_checkpointing=case.checkpointing,
    )
    return Job(
        facts=request.facts,
        counts=request.counts,
        workload=request.workload,
        cluster=cluster,
        configuration=configuration,
    )


def traced(case: TraceCase) -> MemoryRun:
    """Return the row of a case."""
    from strategies.tracing.step.refusal import TraceFailed
    from strategies.tracing.step.step import trace_step

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    job = job_of(case)
    try:
        totals = trace_step(job).totals
    except (TraceFailed, ValueError) as problem:  # FSDP2 refuses scalar parameters, such as CLIP's
        print(f"  {case.model}: {problem}", file=sys.stderr, flush=True)
        return _row(job, "failed", {})
    return _row(job, "completed", totals)


def _row(job: Job, outcome: str, totals: dict[str, int]) -> MemoryRun:
    chosen = job.configuration
    names = ("strategy", "backend", "dp_replicate", "dp_shard", "tp", "pp", "micro_batch_size", "precision")
    names += ("gradient_accumulation_steps", "global_batch_size", "sequence_length", "optimizer", "attention")
    names += ("activation_checkpointing", "offload", "sync_each_micro_batch")
    return MemoryRun(
        **{name: getattr(chosen, name) for name in names},
        **{f"{phase}_bytes": size for phase, size in totals.items()},
        model=job.facts.name,
        config="",
        task=job.workload.task,
        device=job.cluster.device.name,
        ranks_per_device=1,
        memory_limit_bytes=0,
        driver="",
        torch=version("torch"),
        transformers=version("transformers"),
        deepspeed="",
        outcome=outcome,
        peak_allocated_bytes=max(totals.values(), default=0),
    )


def main() -> None:
    """Trace the grid and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="MODEL_TYPE", help="trace these families alone")
    parser.add_argument("--again", action="store_true", help="trace anew what has a row")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    cases = [case for case in trace_grid() if not arguments.only or find_model(case.model).model_type in arguments.only]
    kept = {run.key: run for run in read_memory_runs(ROWS)}
    keys = {_row(job_of(case), "completed", {}).key: case for case in cases}
    wanted = [case for key, case in keys.items() if arguments.again or key not in kept]
    with ProcessPoolExecutor(max_workers=arguments.workers) as workers:
        pending = [workers.submit(traced, case) for case in wanted]
        for number, future in enumerate(as_completed(pending), start=1):
            run = future.result()
            kept[run.key] = run
            write_memory_runs(ROWS, kept.values())
            print(
                f"{number}/{len(wanted)} {run.model} {run.strategy} {run.peak_allocated_bytes / 2**30:.2f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
