"""Measures the search against pricing every configuration, question by question, in one process and in turn.

    python -m scripts.bench.search [--rounds N]

Every round asks in a fresh interpreter, since the memory model remembers what it worked out. The bests of every group
have to agree, or the script ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.search import evaluate
from planner.search.device_counts import device_counts
from planner.search.evaluate import best
from planner.search.ranking import Timed
from planner.search.request import Request
from planner.search.search import group_candidates
from tests.planner.search.exhaustive import best_by_group
from tests.planner.search.questions import question

MEGATRON = {"code": "megatron", "allow_unrunnable": True}
QUESTIONS: tuple[tuple[str, str, int, Mapping[str, Any]], ...] = (
    ("opt-6.7b", "a100-80gb", 8, {}),
    ("llama-2-70b", "h100", 64, {}),
    ("llama-2-70b", "h100", 1024, {}),
    ("llama-3.1-405b", "h100", 1024, {}),
    ("llama-3-8b", "h100", 64, {"objective": "cost"}),
    ("llama-3-8b", "h100", 64, {"objective": "memory"}),
    ("llama-3.1-405b", "h100", 16384, {**MEGATRON, "seq_len": 131072, "global_batch": 128}),
    ("mixtral-8x22b", "t4", 64, {}),  # nothing fits
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One question asked one way: seconds, configurations whose memory was worked out, and what was found."""

    seconds: float
    priced: int
    plans: Mapping[str, str]


def pruned(request: Request) -> dict[str, Timed]:
    """Return the best plan of each group as the search finds it."""
    plans = {name: best(group, request.objective) for name, group in group_candidates(request).items()}
    return {name: item for name, item in plans.items() if item is not None}


def exhaustive(request: Request) -> dict[str, Timed]:
    """Return the best plan of each group among all, each of them priced."""
    return best_by_group(device_counts(request))


WAYS: Mapping[str, Callable[[Request], dict[str, Timed]]] = {"pruned": pruned, "exhaustive": exhaustive}


def ask(kind: str, number: int) -> Run:
    """One question in this process."""
    from tests.planner.search import exhaustive as every

    model, gpu, gpus, options = QUESTIONS[number]
    request = question(model, gpu, gpus, **options)
    counted, real = [0], evaluate.price

    def price(*arguments: Any) -> Any:
        counted[0] += 1
        return real(*arguments)

    evaluate.price = every.price = price
    start = time.perf_counter()
    plans = WAYS[kind](request)
    seconds = time.perf_counter() - start
    return Run(
        seconds=seconds, priced=counted[0], plans={name: str(item.configuration) for name, item in plans.items()}
    )


def ask_elsewhere(kind: str, number: int) -> Run:
    """Return what a search takes in a process of its own."""
    command = [sys.executable, __file__, "--ask", kind, str(number)]
    return Run(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> int:
    """Print what both searches take, and whether they agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        run = ask(arguments.ask[0], int(arguments.ask[1]))
        print(json.dumps({"seconds": run.seconds, "priced": run.priced, "plans": run.plans}))
        return 0
    differ = 0
    print(f"{'question':44} {'priced':>6} {'of':>6} {'seconds':>8} {'of':>8} {'ratio':>6}")
    for number, (model, gpu, gpus, options) in enumerate(QUESTIONS):
        runs = [{kind: ask_elsewhere(kind, number) for kind in WAYS} for _ in range(arguments.rounds)]
        few, every = ([run[kind] for run in runs] for kind in WAYS)
        seconds, reference = (statistics.median(run.seconds for run in taken) for taken in (few, every))
        name = f"{model}, {gpus} x {gpu}, {options.get('objective', 'throughput')}"
        took = f"{seconds:8.3f} {reference:8.3f} {reference / seconds:5.1f}x"
        print(f"{name:44} {few[0].priced:6} {every[0].priced:6} {took}")
        differ += few[0].plans != every[0].plans
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
