"""`dsplan run --rates`: shares of the batch by how fast ranks are, or were in an earlier run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import DsplanError
from planner.errors import ContradictoryRequest
from planner.types.plan_io import save_plan
from strategies.autoplan.select import why_another_group
from strategies.errors import CannotRun
from strategies.launch.hooks.capabilities import require_plan
from strategies.launch.options import parse_rates
from strategies.launch.prepare import RunRequest, prepare
from strategies.run_directory.files import PLAN_FILE, metrics_path
from strategies.run_directory.request import PlanRequest
from strategies.telemetry.metrics import relative_rates
from tests.strategies.launch.command import run
from tests.strategies.training_bodies import Recipe

SLOW_RANK = """
import os, time, torch, dsplan
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 28 * 12

    def __getitem__(self, index):
        return torch.full((8,), index / 336), torch.tensor(index / 336)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)

    def forward(self, x, y):
        time.sleep(0.02 * len(x) * (2 if os.environ["RANK"] == "3" else 1))
        return ((self.line(x).squeeze(-1) - y) ** 2).mean()

torch.manual_seed(0)
engine, _, loader, _ = dsplan.initialize(model=Model(), training_data=Data(), config={"train_batch_size": 28})
for x, y in loader:
    engine.backward(engine(x, y))
    engine.step()
"""


def step(number: int, ready: float, samples: int = 14, load: float = 0.01) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "global_step": number + 1, "loss": 1.0, "seconds": 0.5, "samples": samples,
        "load_seconds": load, "ready_seconds": load + ready,
    }  # fmt: skip


def rows(*ready: float, samples: int = 14) -> list[list[dict[str, Any]]]:
    return [[step(number, each, samples) for number in range(8)] for each in ready]


def test_a_rank_is_as_fast_as_its_forward_passes() -> None:
    assert relative_rates(rows(0.14, 0.141, 0.139, 0.28)) == "3x1,1x0.5"
    assert relative_rates([*rows(0.16, samples=16), *rows(0.16, samples=8)]) == "1x1,1x0.5", "with shares already"
    assert relative_rates(rows(0.1)) is None
    assert relative_rates([*rows(0.1), []]) is None


def test_rates_are_written_or_those_of_a_run(tmp_path: Path) -> None:
    assert parse_rates("3x1,0.5") == "3x1,0.5"
    for rank, lines in enumerate(rows(0.1, 0.2)):
        metrics_path(tmp_path, rank).write_text("\n".join(map(json.dumps, lines)))
    assert parse_rates(str(tmp_path)) == "1x1,1x0.5"


@pytest.mark.parametrize("text", ["", "3y", "1,0", "no-such-run"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ContradictoryRequest):
        parse_rates(text)


def test_ranks_that_wait_for_each_other_measure_nothing(tmp_path: Path) -> None:
    save_plan(Recipe(strategy="fsdp", world_size=2).plan(), tmp_path / PLAN_FILE)
    with pytest.raises(DsplanError, match="under fsdp ranks wait for each other"):
        parse_rates(str(tmp_path))
    plan = Recipe(strategy="ddp", world_size=2).plan()
    staged = replace(plan.configuration, dp_replicate=1, pp=2, micro_batch_size=2 * plan.configuration.micro_batch_size)
    save_plan(replace(plan, configuration=staged), tmp_path / PLAN_FILE)
    with pytest.raises(DsplanError, match="with pp 2 ranks have unlike parts of the model"):
        parse_rates(str(tmp_path))
    save_plan(plan, tmp_path / PLAN_FILE)
    with pytest.raises(DsplanError, match="holds no steps of several ranks"):
        parse_rates(str(tmp_path))


def test_a_plan_has_shares_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ContradictoryRequest, match="--plan and --rates cannot both decide"):
        prepare(RunRequest(script=script, plan=PlanRequest(plan_file="plan.yaml", rates="3x1,1x0.5")))


def uneven_plan(**groups: Any) -> Any:
    plan = Recipe(strategy="ddp", world_size=4, global_batch=28).plan()
    shares = replace(plan.configuration, micro_batches="3x8,1x4", micro_batch_size=8)
    return replace(plan, configuration=shares, cluster={**plan.cluster, **groups})


def test_other_scripts_read_as_many_samples_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotRun, match="HF Trainer reads as many samples on every rank, and the plan has micro-batch"):
        require_plan("huggingface", uneven_plan(), gpus=False)
    for name, value in PlanRequest(rates="3x1,1x0.5").to_variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CannotRun, match="accelerate reads as many samples on every rank, and --rates"):
        require_plan("accelerate", Recipe(strategy="ddp", world_size=4).plan(), gpus=False)


def test_nodes_of_unlike_sizes_are_started_by_others(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "plan.yaml"
    script.touch()
    sizes = [{"device": "cpu", "nodes": 1, "gpus_per_node": count} for count in (3, 1)]
    save_plan(uneven_plan(groups=sizes), file)
    with pytest.raises(DsplanError, match="its nodes have unlike numbers of GPUs"):
        prepare(RunRequest(script=script, plan=PlanRequest(plan_file=str(file))))


def test_a_rank_on_the_other_kind_of_gpu_is_told() -> None:
    kinds = [("H100-SXM5-80GB", 3), ("A100-SXM4-80GB", 1)]
    plan = uneven_plan(groups=[{"device": name, "nodes": nodes, "gpus_per_node": 1} for name, nodes in kinds])
    here = {rank: why_another_group(plan, rank, "NVIDIA A100-SXM4-80GB") for rank in (2, 3)}
    assert str(here[2]).startswith("rank 2 is on A100-SXM4-80GB and the plan's share for it is of H100-SXM5-80GB")
    assert here[3] is None
    assert why_another_group(plan, 2, "a GPU of tomorrow") is None
    assert why_another_group(uneven_plan(), 2, "NVIDIA A100-SXM4-80GB") is None


@pytest.mark.slow
def test_a_run_is_measured_and_the_next_one_is_shared_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLOW_RANK)
    options = ("--nproc", "4", "--strategy", "ddp", "--json")
    even = run(*options, "--run-dir", tmp_path / "even", script, cwd=tmp_path).json
    shared = run(*options, "--rates", tmp_path / "even", "--run-dir", tmp_path / "shared", script, cwd=tmp_path).json
    assert even["plan"]["plan"]["micro_batches"] == ""
    assert shared["plan"]["plan"]["micro_batches"] == "3x8,1x4"
    assert shared["measured"]["last_loss"] == pytest.approx(even["measured"]["last_loss"], rel=1e-5)
    # 7 samples of 0.04 s on the slow rank, or 8 of 0.02 s on the others: messages come on top of both.
    assert shared["measured"]["step_seconds"] < 0.85 * even["measured"]["step_seconds"]
    again = run("--plan", tmp_path / "shared" / PLAN_FILE, "--json", script, cwd=tmp_path).json
    assert again["measured"]["last_loss"] == pytest.approx(shared["measured"]["last_loss"], rel=1e-5)
