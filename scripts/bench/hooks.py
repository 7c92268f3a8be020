"""Measures what the hooks cost a script that uses none of the libraries they wait for, in one run.

    python -m scripts.bench.hooks [--rounds N] [--blocks N]

Start-up: fresh interpreters in turn, with hooks and without, to the end of the first optimizer step; every hooked one
is set against the bare one beside it. Steps: one process in which blocks of steps with the hooks in place and with them
taken out follow each other; what the hooks do is a constant, which steps of a tiny model show best. Seconds are the
processor's, as other programs on the machine count in all others. Medians, with the second and the next to last.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from strategies.launch.hooks import observer, places
from strategies.variables import RUN_DIRECTORY

START_UP_LIMIT_SECONDS = 0.050
STEP_LIMIT = 0.005
_WARM_UP = 5

Step = Callable[[], object]


def _model(width: int, layers: int) -> Step:
    """One optimizer step of a small language model, as a plain loop writes it."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    table, head = torch.nn.Embedding(512, width), torch.nn.Linear(width, 512)
    weights = [*body.parameters(), *table.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights)
    tokens = torch.randint(0, 512, (4, 128))

    def step() -> float:
        logits = head(body(table(tokens)))
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 512), tokens.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def _start(*, hooked: bool) -> float:
    """Seconds of the processor that a fresh rank takes to the end of its first step; every rank has met the others."""
    lines = ["import time", "began = time.process_time()"]
    if hooked:
        lines += ["from strategies.launch.hooks import places", "places.install()"]
    lines += ["import strategies.distributed.environment", f"source = {inspect.getsource(_model)!r}"]
    lines += ["exec(source.replace('-> Step', ''))", "_model(64, 1)()", "print(time.process_time() - began)"]
    command = [sys.executable, "-c", "\n".join(lines)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def _blocks(step: Step, rounds: int, steps: int) -> list[tuple[float, float]]:
    """Seconds per step with hooks and without, of blocks that follow each other."""
    import torch
    from torch.optim import optimizer as optimizers

    hooks: tuple[Any, Any] = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    kept, hooked_backward = [dict(held) for held in hooks], torch.autograd.backward

    def put(*, there: bool) -> None:
        for held, content in zip(hooks, kept, strict=True):
            held.clear()
            held.update(content if there else {})
        torch.autograd.backward = hooked_backward if there else hooked_backward.__wrapped__  # type: ignore[attr-defined]

    for _ in range(_WARM_UP):  # the third step has its memory counted, which is slow and comes once
        step()
    pairs = []
    for number in range(rounds):
        seconds = {}
        for there in (True, False) if number % 2 else (False, True):
            put(there=there)
            began = time.process_time()
            for _ in range(steps):
                step()
            seconds[there] = (time.process_time() - began) / steps
        pairs.append((seconds[True], seconds[False]))
    put(there=True)
    observer._observer._first = None  # the next optimizer that steps is the one whose steps count
    return pairs


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(1, len(ordered) - 1)], ordered[-min(2, len(ordered))]


def main() -> int:
    """Time calls with hooks and without, and print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="pairs of interpreters")
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks of steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {RUN_DIRECTORY: directory, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        _start(hooked=True)  # files into the cache
        starts = [(_start(hooked=True), _start(hooked=False)) for _ in range(arguments.rounds)]
        places.install()
        steps, tiny = _blocks(_model(256, 4), arguments.blocks, 5), _blocks(_model(8, 1), 40, 50)
    bare_start, bare_step = (statistics.median(bare for _, bare in pairs) for pairs in (starts, steps))
    added, low, high = _spread([hooked - bare for hooked, bare in starts])
    between = f"{low * 1000:.1f} to {high * 1000:.1f}"
    print(f"start to first step   bare {bare_start:.3f} s, hooks add {added * 1000:.1f} ms ({between})")
    ratio, low, high = _spread([hooked / bare for hooked, bare in steps])
    print(f"step                  bare {bare_step * 1000:.2f} ms, with hooks x {ratio:.4f} ({low:.4f} to {high:.4f})")
    own = statistics.median(hooked - bare for hooked, bare in tiny)
    print(f"hooks, in tiny steps  {own * 1e6:.0f} us each, {own / bare_step:.3%} of the step above")
    return int(added > START_UP_LIMIT_SECONDS or own / bare_step > STEP_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
