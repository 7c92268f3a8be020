"""4, then 2, then 3 ranks resume one training: a plan is made for those that are left, and the losses stay, also where
the ranks split the model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hardware_db.probe import probe
from planner.cluster.resolve import probed_cluster
from planner.search.estimate import estimate
from planner.search.request import WorkOptions, make_request
from planner.types.plan import Configuration
from planner.types.plan_io import load_plan, save_plan
from strategies.tracing.live import facts_from_module
from tests.strategies.launch.command import ROOT, Finished, run, start_run

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
"""
TRAIN = """
import json, os, sys, time
import dsplan, torch
import torch.distributed as dist
from tiny_net import Net

STEPS, LOSSES, FAILS_AT = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(64, (8,), generator=torch.Generator().manual_seed(index))
        return {"ids": ids, "labels": ids}

sgd = {"type": "SGD", "params": {"lr": 0.5}}
engine, _, loader, _ = dsplan.initialize(
    model=Net(), training_data=Data(), config={"train_batch_size": 8, "optimizer": sgd}
)
ranks = engine.environment.world_size
of_step = torch.zeros(())
while engine.global_steps < STEPS:
    for batch in loader:
        loss = engine(**batch)
        engine.backward(loss)
        of_step += loss.detach() * len(batch["ids"]) / 8
        before = engine.global_steps
        engine.step()
        if engine.global_steps == before:
            continue
        if ranks > 1:
            dist.all_reduce(of_step)
        if engine.is_main:
            with open(LOSSES, "a") as file:
                row = [engine.global_steps, of_step.item(), engine.configuration.strategy, ranks]
                file.write(json.dumps(row) + "\\n")
        of_step.zero_()
        if engine.global_steps == FAILS_AT:
            engine.wait_for_checkpoint()
            raise ConnectionError("the nodes are gone")
        if engine.global_steps == STEPS:
            break
"""


def _sharded_plan(folder: Path) -> Path:
    """A plan for 4 ranks that none would choose by itself."""
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    net = scope["Net"]
    assert callable(net)
    request = make_request(
        facts_from_module(net()),
        probed_cluster(probe(), ranks=4),
        WorkOptions(seq_len=8, global_batch=8, precision="fp32", optimizer="sgd"),
    )
    configuration = Configuration(
        strategy="fsdp",
        backend="torch",
        dp_shard=4,
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        global_batch_size=8,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
    )
    path = folder / "four.yaml"
    save_plan(estimate(request, configuration), path)
    return path


def _losses(path: Path) -> dict[int, float]:
    return {row[0]: row[1] for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_fewer_and_more_ranks_continue_under_plans_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "tiny_net.py").write_text(MODEL)
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAIN)
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def trained(*options: str | Path, losses: Path, fails_at: int = 0) -> Finished:
        finished = run(*options, script, "9", str(losses), str(fails_at), cwd=tmp_path)
        assert finished.status == (1 if fails_at else 0), finished.err
        return finished

    alone = [sys.executable, str(script), "9", str(whole), "0"]
    subprocess.run(alone, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=200)
    watched = ("--checkpoint-steps", "1", "--retries", "0")
    trained("--plan", _sharded_plan(tmp_path), "--run-dir", folder, *watched, losses=parts, fails_at=3)
    trained("--resume", folder, "--nproc", "2", losses=parts, fails_at=6)
    used = load_plan(folder / "plan.yaml").configuration
    assert (used.world_size, used.global_batch_size) == (2, 8)
    assert used.strategy != "fsdp"
    # A batch of 8 cannot be split over 3 ranks.
    trained("--resume", folder, "--nproc", "3", losses=parts)
    waited = (folder / "rank2.stderr.log").read_text()
    assert "rank 2 of 3 waits: the global batch of 8 is split over 2 ranks" in waited
    rows = [json.loads(line) for line in parts.read_text().splitlines()]
    assert [row[0] for row in rows] == list(range(1, 10))
    assert [row[3] for row in rows] == [4, 4, 4, 2, 2, 2, 2, 2, 2]
    assert [row[2] for row in rows] == ["fsdp"] * 3 + [used.strategy] * 6
    assert _losses(parts) == pytest.approx(_losses(whole), rel=1e-6)


SPLIT = """
import itertools, json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import dsplan

losses, fails_at, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32, tie_word_embeddings=True))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

engine, _, loader, _ = dsplan.initialize(
    model,
    lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    training_data=Data(),
    config={"train_batch_size": 12, "gradient_clipping": 1.0},
)
plan = engine.configuration
batches = itertools.chain.from_iterable(itertools.repeat(loader))
while engine.global_steps < 12:
    time.sleep(pause)
    loss = engine.train_batch(batches).item()
    if engine.is_main:
        with open(losses, "a") as file:
            row = [engine.global_steps, loss, plan.strategy, plan.world_size, plan.tp, plan.pp]
            file.write(json.dumps(row) + "\\n")
    if engine.global_steps == fails_at:
        engine.wait_for_checkpoint()
        raise ConnectionError("the nodes are gone")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tp_and_pp_change_with_the_ranks_that_there_are(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SPLIT)
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def trained(*options: str | Path, losses: Path, fails_at: int = 0) -> None:
        finished = run(*options, script, str(losses), str(fails_at), "0", cwd=tmp_path)
        assert finished.status == (1 if fails_at else 0), finished.err

    split = ("--strategy", "fsdp", "--tp", "2", "--pp", "2", "--nproc", "4", "--checkpoint-steps", "1")
    trained(*split, "--run-dir", tmp_path / "undisturbed", losses=whole)
    trained(*split, "--retries", "0", "--run-dir", folder, losses=parts, fails_at=3)
    trained("--resume", folder, "--nproc", "2", losses=parts, fails_at=6)
    trained("--resume", folder, "--nproc", "3", losses=parts, fails_at=9)
    trained("--resume", folder, "--nproc", "4", losses=parts)
    rows = [json.loads(line) for line in parts.read_text().splitlines()]
    assert [row[0] for row in rows] == list(range(1, 13))
    assert {row[2] for row in rows} == {"fsdp"}
    assert [row[3] for row in rows] == [4, 4, 4, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    splits = [tuple(row[4:]) for row in rows]
    assert splits[:3] == splits[9:] == 3 * [(2, 2)]
    assert set(splits[3:6]) <= {(1, 1), (2, 1), (1, 2)}  # as the planner says
    assert splits[6:9] == 3 * [(1, 1)]
    assert _losses(parts) == pytest.approx(_losses(whole), rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_is_lost_takes_tp_or_pp_with_it_and_one_that_comes_brings_it_back(tmp_path: Path) -> None:
    script, whole, parts = tmp_path / "train.py", tmp_path / "whole", tmp_path / "parts"
    script.write_text(SPLIT)
    split = ("--strategy", "fsdp", "--tp", "2", "--pp", "2", "--checkpoint-steps", "1")
    alone = run(*split, "--nproc", "4", "--run-dir", tmp_path / "alone", script, whole, "0", "0", cwd=tmp_path)
    assert alone.status == 0, alone.err
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    meeting = ("--nproc", "2", "--nodes", "1:2", "--rendezvous", f"127.0.0.1:{port}")
    nodes: list[subprocess.Popen[str]] = []

    def starts() -> None:
        own = ("--run-dir", tmp_path / f"node{len(nodes)}", "--checkpoint-dir", tmp_path / "checkpoints")
        nodes.append(start_run(*split, *meeting, *own, script, parts, "0", "1", cwd=tmp_path))

    def rows() -> list[Any]:
        return [json.loads(line) for line in parts.read_text().splitlines()] if parts.exists() else []

    def trained(ranks: int, since: int) -> bool:
        return any(row[3] == ranks for row in rows()[since:])

    def until(ranks: int) -> None:
        since, deadline = len(rows()), time.monotonic() + 200
        while not trained(ranks, since):
            assert nodes[0].poll() is None, "the first node ended"
            assert time.monotonic() < deadline, f"nobody trains on {ranks} ranks"
            time.sleep(0.1)

    try:
        starts()
        starts()
        until(4)
        nodes[1].kill()
        until(2)
        starts()
        until(4)
        outs = [node.communicate(timeout=200) for node in (nodes[0], nodes[2])]
    finally:
        for node in nodes:
            node.kill()
    assert [nodes[0].returncode, nodes[2].returncode] == [0, 0], outs
    assert all(row[4] * row[5] <= row[3] and (row[4:] == [2, 2]) is (row[3] == 4) for row in rows())
    # A step at whose end the ranks were asked to save and leave is done, and its script did not come to its line.
    changed, right = _losses(parts), _losses(whole)
    assert len(changed) >= 11
    assert [changed[step] for step in changed] == pytest.approx([right[step] for step in changed], rel=1e-6)
