"""Published runs as tables of the accuracy report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.fit.published_memory import left_out
from scripts.report.accuracy_cases import Case
from scripts.report.accuracy_tables import gib, listed, spread, table

HEAD = """
## Against published runs

Dense models, full training, figures that others printed. `hardware_db/measurements/published_memory.csv` holds each run
in the words of a plan, with its document and with what had to be assumed. A figure of unknown kind is compared with
what the driver would show. Most ran on code that dsplan does not plan for, so that these errors hold the differences
between that code and transformers too:

* **megatron, megatron-deepspeed, megatron-core, nemo**: fused softmax, GELU and cross-entropy; DeepSpeed of 2021 and
  2022. The 176B and 1.3B figures were read off `nvidia-smi` in whole GB on the first or last node, where the estimate
  is of the busiest rank; the golden figures are those of the last pipeline stage alone.
* **torchtitan**: selective recomputation keeps every second matrix product where the plan keeps all; `compiled` fuses
  more, and figures of one job on three GPUs differ by 41 %.
* **llm-foundry**: cross-entropy is fused and writes its gradient over the logits; transformers needs up to 12 bytes per
  logit there.
* **litgpt**: the sequence length is the longest possible, and samples are shorter.
* **jax, xla**: the compiler's own buffer assignment.
"""
MISFIT = """
### Runs that ran and are called "does not fit"
"""
OUT_OF_MEMORY = """
### Runs that ran out of memory

What each would use where there is room, and what it needs at the least, which decides, beside what the card has.
"""
LEFT_OUT = """
### What was left out

Rows of the collection that lack what a plan needs, or that say what the file of this table has no column for: it was
read when plans had neither fp8 nor cp, ep, virtual stages and adapters. *Asked through the command line* has those
marked *(asked)*, with the answer or why there is none.
"""


def published(cases: Sequence[Case]) -> Iterator[str]:
    """By source, then the verdicts that were wrong, then case by case."""
    measured = [case for case in cases if case.measured]
    yield HEAD
    yield from _by_source(measured)
    yield MISFIT
    yield from _misfits([case for case in cases if case.ran and case.verdict == "does_not_fit"])
    yield OUT_OF_MEMORY
    yield from _needs([case for case in cases if not case.ran])
    yield "\n### Every case\n"
    yield from listed(measured)
    yield LEFT_OUT
    columns = ("source", "why", "rows", "with memory", "out of memory")
    yield from table(columns, ([str(row[name.replace(" ", "_")]) for name in columns] for row in left_out()))
    yield ""


def _by_source(measured: Sequence[Case]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in measured:
        groups.setdefault((case.source, case.code, case.kind), []).append(case)
    columns = ("source", "code", "figure", "cases", "median size", "90 % within", "most over", "most under")
    yield from table(columns, ([*key, *spread(case.error for case in group).cells] for key, group in groups.items()))


def _misfits(cases: Sequence[Case]) -> Iterator[str]:
    """Those that print their memory one by one, the others counted by source."""
    printed = [case for case in cases if case.measured]
    yield from _needs(printed)
    yield ""
    others = [case.source for case in cases if not case.measured]
    counts = (f"{others.count(source)} of {source}" for source in dict.fromkeys(others))
    yield f"Of those that print no memory: {', '.join(counts) or 'none'}."


def _needs(cases: Sequence[Case]) -> Iterator[str]:
    columns = ("case", "model", "how", "uses GiB", "needs", "has", "printed", "called", "assumed")
    yield from table(columns, (_need(case) for case in cases))


def _need(case: Case) -> list[str]:
    memory = case.memory
    sizes = [memory.device_used_bytes, memory.device_needed_bytes, case.job.cluster.capacity_bytes]
    printed = gib(case.measured) if case.measured else "-"
    words = [case.verdict.replace("_", " "), case.note or "-"]
    return [case.name, case.model, case.how, *map(gib, sizes), printed, *words]
