"""A plan that is too large on purpose: the run goes down the chain of plans to one that fits; the machine remembers.

The machine's memory is what the probe says; what a rank may really take is less (RLIMIT_DATA), which nobody is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.types.plan_io import load_plan
from tests.strategies.launch.command import ROOT, check_next_plan, run

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(128, 512)

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def make():
    return Net()
"""
TRAIN = """
import resource
import dsplan, torch
from tiny_net import make

LENGTH, BATCH, MIB = 64, 256, 1 << 20

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * BATCH

    def __getitem__(self, index):
        ids = torch.randint(512, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"ids": ids, "labels": ids}

engine, _, loader, _ = dsplan.initialize(model=make(), training_data=Data(), config={"train_batch_size": BATCH})
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
limit = used + ROOM * MIB
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for batch in loader:
    engine.backward(engine(**batch))
    engine.step()
    if engine.global_steps == 3:
        break
"""
ROOM_MIB = 170
"""Half of what the activations of the fastest plan take, and more than those of a quarter of its micro-batch with all
that is not activations."""


def _recommended(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "dsplan", "recommend", "--model", "tiny_net:make", "--gpu", "cpu", "--gpus", "2"]
    words = [*command, "--seq-len", "64", "--global-batch", "256", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


@pytest.mark.slow  # several attempts; in the suite test_failures.py runs out of memory once
def test_a_plan_that_is_too_large_gives_way_to_one_that_fits_and_is_not_proposed_again(tmp_path: Path) -> None:
    (tmp_path / "tiny_net.py").write_text(MODEL)
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("ROOM", str(ROOM_MIB)))
    finished = run("--json", "--nproc", "2", "--run-dir", tmp_path / "run", script, cwd=tmp_path)
    check_next_plan(finished, _recommended(tmp_path))
    used = load_plan(tmp_path / "run" / "plan.yaml").configuration
    assert used.global_batch_size == 256


SPLIT = """
import itertools, json, resource, sys
import dsplan, torch
from transformers import LlamaConfig, LlamaForCausalLM

losses, is_short = sys.argv[1], len(sys.argv) > 2
torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=32))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

engine, _, loader, _ = dsplan.initialize(
    model,
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    training_data=Data(),
    config={"train_batch_size": 4},
)
plan = engine.configuration
batches = itertools.chain.from_iterable(itertools.repeat(loader))
while engine.global_steps < 6:
    if is_short and engine.global_steps == 2 and not plan.splits_model:  # no room for whole layers any more
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used, used))
        torch.empty(1 << 30, dtype=torch.uint8)
    loss = engine.train_batch(batches).item()
    if engine.is_main:
        with open(losses, "a") as file:
            file.write(json.dumps([engine.global_steps, loss, plan.strategy, plan.tp, plan.pp]) + "\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whole_layers_that_are_too_large_give_way_to_split_ones(tmp_path: Path) -> None:
    script, rows = tmp_path / "train.py", dict[str, list[Any]]()
    script.write_text(SPLIT)
    for name, words in (("undisturbed", ()), ("short", ("short",))):
        options = ("--strategy", "ddp", "--nproc", "2", "--checkpoint-steps", "1", "--run-dir", tmp_path / name)
        finished = run(*options, script, str(tmp_path / f"{name}.jsonl"), *words, cwd=tmp_path)
        assert finished.status == 0, finished.err
        rows[name] = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    by_step = {row[0]: row for row in rows["short"]}
    assert sorted(by_step) == list(range(1, 7))
    assert [row[2] for row in by_step.values()] == 6 * ["ddp"]
    assert [row[3] * row[4] for row in by_step.values()] == [1, 1, 2, 2, 2, 2]
    assert [row[1] for row in by_step.values()] == pytest.approx([row[1] for row in rows["undisturbed"]], rel=1e-5)
    used = load_plan(tmp_path / "short" / "plan.yaml").configuration
    assert (used.splits_model, used.global_batch_size) == (True, 4)
    page = (tmp_path / "short" / "report.md").read_text()
    assert "out of memory" in page
    assert f"ddp{used.degrees_text}, micro-batch {used.micro_batch_size} x" in page
