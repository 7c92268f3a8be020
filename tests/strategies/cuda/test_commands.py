"""Commands on a machine with cards: scripts of other people under a plan, `dsplan bench`, `dsplan doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.plan import Wanted, load_bench_plan, make_bench_plan, save_bench_plan
from hardware_db.files import provide_torch_extensions
from hardware_db.microbench.grid import Point
from planner.cluster.resolve import probed_cluster
from tests.dsplan.diagnostics.bench.samples import LAPTOP
from tests.emulated_cuda import Card, environment
from tests.emulated_cuda.fixtures import variables_set
from tests.strategies.launch.command import IMAGES, ROOT, run

pytestmark = pytest.mark.slow  # each starts ranks; what they run is in the suite by itself

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
args = TrainingArguments(
    output_dir="out", max_steps=4, per_device_train_batch_size=2, report_to="none", save_strategy="no"
)
data = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 32))]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
print("TRAINED ON", args.device.type, args.ddp_backend)
"""
LOOP = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(3)
raw = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(device)
model = DistributedDataParallel(raw, device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    batch = torch.randn(8, 16)  # DDP brings it to the card
    loss = torch.nn.functional.cross_entropy(model(batch), torch.arange(8, device=device) % 4)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print("TRAINED ON", raw[0].weight.device.type, f"{loss.item():.5f}")
dist.destroy_process_group()
"""
SHARDED = LOOP.replace("DistributedDataParallel(raw, device_ids=[device.index])", "fully_shard(raw)").replace(
    "from torch.nn.parallel import DistributedDataParallel", "from torch.distributed.fsdp import fully_shard"
)
DEEPSPEED = """
import deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
config = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4):
    batch = torch.randn(8, 16, device=engine.device)
    loss = torch.nn.functional.cross_entropy(engine(batch), torch.arange(8, device=engine.device) % 4)
    engine.backward(loss)
    engine.step()
print("TRAINED ON", engine.device.type, engine.zero_optimization_stage())
"""
LIGHTNING = """
import lightning, torch

class Small(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def training_step(self, batch, index):
        samples, classes = batch
        return torch.nn.functional.cross_entropy(self.layer(samples), classes)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

lightning.seed_everything(3)
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.arange(64) % 4)
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_steps=4, **quiet)
model = Small()
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
print("TRAINED ON", trainer.strategy.root_device.type, trainer.world_size)
"""
SCRIPTS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "huggingface": (TRAINER, "transformers", (), "TRAINED ON cuda cpu:gloo,cuda:nccl"),
    "deepspeed": (DEEPSPEED, "deepspeed", ("--strategy", "zero2"), "TRAINED ON cuda 2"),
    "lightning": (LIGHTNING, "lightning", ("--strategy", "zero1"), "TRAINED ON cuda 2"),
    "accelerate": (IMAGES.read_text(), "accelerate", ("--strategy", "fsdp"), "WRAPPED FSDPSequential 2.0"),
}


@pytest.fixture
def machine(cuda_environment: Mapping[str, str], tmp_path: Path) -> Iterator[None]:
    """Two cards with room for a plan, whose rates are known: measuring them takes emulated ones a minute."""
    cards = environment([Card(total_memory=16 << 30)] * 2, tmp_path / "cards") if cuda_environment else {}
    variables = {**os.environ, **cards}
    provide_torch_extensions(variables)
    with variables_set({name: value for name, value in variables.items() if os.environ.get(name) != value}):
        if cards:
            subprocess.run([sys.executable, "-m", "tests.strategies.cuda.store_rates"], check=True, cwd=ROOT)
        yield


def _script(folder: Path, source: str) -> Path:
    script = folder / "train.py"
    script.write_text(source)
    return script


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_trains_on_two_cards_under_a_plan(kind: str, tmp_path: Path) -> None:
    source, library, options, printed = SCRIPTS[kind]
    pytest.importorskip(library)
    finished = run("--nproc", "2", *options, "--json", _script(tmp_path, source), cwd=tmp_path)
    assert finished.status == 0, finished.err
    answer = finished.json
    assert (answer["trained_with"], answer["measured"]["steps"]) == (kind, 4)
    assert answer["plan"]["cluster"]["device"] != "cpu"
    assert printed in finished.err


@pytest.mark.usefixtures("machine")
def test_another_strategy_takes_the_place_of_ddp_on_cards(tmp_path: Path) -> None:
    lines = []
    for options in ((), ("--strategy", "zero2")):
        finished = run("--nproc", "2", *options, "--json", _script(tmp_path, LOOP), cwd=tmp_path)
        assert finished.status == 0, finished.err
        assert finished.json["measured"]["steps"] == 4
        lines += [line for line in finished.err.splitlines() if "TRAINED ON cuda" in line]
    by_ddp, by_zero = lines
    assert by_ddp == by_zero
    assert "zero2 takes the place of DDP at train.py, line 11" in finished.err


@pytest.mark.usefixtures("machine")
def test_a_script_that_shards_its_model_itself_trains_on_cards_under_no_other_strategy(tmp_path: Path) -> None:
    script = _script(tmp_path, SHARDED)
    trained = run("--nproc", "2", "--strategy", "fsdp", "--json", script, cwd=tmp_path)
    assert trained.status == 0, trained.err
    assert trained.json["measured"]["steps"] == 4
    assert "TRAINED ON cuda" in trained.err
    refused = run("--nproc", "2", "--strategy", "zero3", script, cwd=tmp_path)
    assert refused.status == 2
    assert "train.py, line 11: the script shards its model itself, so strategy 'zero3' cannot be" in refused.err


@pytest.mark.usefixtures("machine")
def test_a_benchmark_measures_and_trains_on_cards(tmp_path: Path) -> None:
    path, point = tmp_path / "bench.yaml", Point(operation="host_to_device", size=1 << 20, ranks=2)
    _dsplan("bench", "--generate", str(path), "--json", cwd=tmp_path)
    small = make_bench_plan(Wanted(ranks=(2,), kinds=("training",), deepspeed=False), probed_cluster(LAPTOP)).training
    save_bench_plan(replace(load_bench_plan(path), points=(point,), training=small[:1]), path)
    answer = _dsplan("bench", "--plan", str(path), "--json", cwd=tmp_path)
    assert answer["refused"] == []
    rate, trained = answer["measured"]
    assert (rate["operation"], rate["unit"]) == ("host_to_device", "bytes/s")
    assert trained["outcome"] == "completed"
    assert trained["measured"]["peak_reserved_bytes"] >= trained["measured"]["peak_allocated_bytes"] > 0


@pytest.mark.usefixtures("machine")
def test_ranks_of_a_doctor_time_the_links_of_their_cards(tmp_path: Path) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *ranks, "-m", "dsplan", "doctor", "--json"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    answer = json.loads(finished.stdout)
    [link] = answer["links"]
    assert link["backend"] == "nccl"
    assert link["bandwidth_bytes_per_s"] > 0 < link["latency_seconds"]


def _dsplan(*arguments: str, cwd: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "dsplan", *arguments]
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer
