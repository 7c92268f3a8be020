"""Measures what the hooks cost a script that uses none of the libraries they wait for, in one run.

    python -m scripts.bench.hooks [--rounds N] [--steps N]

Start-up: fresh interpreters in turn, with hooks and without, from the first line to the end of the first optimizer step;
every hooked one is set against the bare one beside it. Steps: one process in which blocks of steps with the hooks in
place and with them taken out follow each other. Medians, with the second and the next to last of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from strategies.launch.hooks import places
from strategies.variables import RUN_DIRECTORY

START_UP_LIMIT_SECONDS = 0.050
STEP_LIMIT = 0.005
_STEPS_IN_BLOCK = 5

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


def _start(hooked: bool) -> float:
    """Seconds of a fresh interpreter from its first line to the end of the first step."""
    lines = ["import time", "began = time.perf_counter()"]
    if hooked:
        lines += ["from strategies.launch.hooks import places", "places.install()"]
    lines += ["import torch", "from scripts.bench.hooks import _model", "_model(64, 1)()"]
    lines += ["print(time.perf_counter() - began)"]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    return float(out.splitlines()[-1])


def _blocks(rounds: int) -> list[tuple[float, float]]:
    """Seconds per step with hooks and without, of blocks that follow each other."""
    places.install()
    import torch
    from torch.optim import optimizer as optimizers

    step = _model(256, 4)
    hooks: tuple[Any, Any] = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    kept, hooked_backward = [dict(held) for held in hooks], torch.autograd.backward

    def put(*, there: bool) -> None:
        for held, content in zip(hooks, kept, strict=True):
            held.clear()
            held.update(content if there else {})
        torch.autograd.backward = hooked_backward if there else hooked_backward.__wrapped__  # type: ignore[attr-defined]

    for _ in range(_STEPS_IN_BLOCK):  # the third step has its memory counted, which is slow and comes once
        step()
    found = []
    for number in range(rounds):
        seconds = {}
        for there in (True, False) if number % 2 else (False, True):
            put(there=there)
            began = time.perf_counter()
            for _ in range(_STEPS_IN_BLOCK):
                step()
            seconds[there] = (time.perf_counter() - began) / _STEPS_IN_BLOCK
        found.append((seconds[True], seconds[False]))
    return found


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(1, len(ordered) - 1)], ordered[-min(2, len(ordered))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="pairs of interpreters")
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks of steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {RUN_DIRECTORY: directory, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        _start(hooked=True)  # files into the cache
        starts = [(_start(hooked=True), _start(hooked=False)) for _ in range(arguments.rounds)]
        steps = _blocks(arguments.blocks)
    bare_start, bare_step = (statistics.median(bare for _, bare in pairs) for pairs in (starts, steps))
    added, low, high = _spread([hooked - bare for hooked, bare in starts])
    print(
        f"start to first step   bare {bare_start:.3f} s, hooks add {added * 1000:.1f} ms ({low * 1000:.1f} to {high * 1000:.1f})"
    )
    ratio, low, high = _spread([hooked / bare for hooked, bare in steps])
    print(f"step                  bare {bare_step * 1000:.2f} ms, with hooks x {ratio:.4f} ({low:.4f} to {high:.4f})")
    return int(added > START_UP_LIMIT_SECONDS or ratio - 1 > STEP_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
