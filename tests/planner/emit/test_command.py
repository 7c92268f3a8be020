"""`dsplan emit` as a process: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.emit import emit
from planner.types.plan_io import plan_to_dict, save_plan
from tests.planner.emit.consumers import ENVIRONMENT
from tests.planner.emit.plans import make_plan


def dsplan_emit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsplan", "emit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    save_plan(make_plan("zero3", offload="nvme"), path)
    return path


def test_the_file_goes_to_stdout_and_the_scripts_duties_to_stderr(plan_file: Path) -> None:
    completed = dsplan_emit(plan_file, "--format", "deepspeed", "--nvme-path", "/scratch")
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["zero_optimization"]["offload_param"]["nvme_path"] == "/scratch"
    assert "loads the model with dtype=torch.bfloat16" in completed.stderr


def test_out_writes_every_file_of_the_format(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "configs"
    completed = dsplan_emit(plan_file, "--format", "accelerate", "--out", out)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == [str(out / "accelerate.yaml"), str(out / "deepspeed.json")]
    written = {path.name: path.read_text() for path in out.iterdir()}
    assert written == emit(make_plan("zero3", offload="nvme"), "accelerate")


def test_json_holds_files_and_duties(plan_file: Path) -> None:
    completed = dsplan_emit(plan_file, "--format", "torchrun", "--json")
    answer = json.loads(completed.stdout)
    assert answer["format"] == "torchrun"
    assert list(answer["files"]) == ["torchrun.sh"]
    assert "uses torch.optim.AdamW" in answer["script"]


def refused(*arguments: object) -> str:
    completed = dsplan_emit(*arguments)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert len(completed.stderr.strip().splitlines()) == 1, completed.stderr
    return completed.stderr


def test_bad_input_is_one_line_and_status_2(plan_file: Path, tmp_path: Path) -> None:
    assert "choose one of deepspeed, accelerate, huggingface," in refused(plan_file, "--format", "slrum")
    assert "cannot be read" in refused(tmp_path / "absent.yaml", "--format", "deepspeed")
    broken, newer, blocked = tmp_path / "broken.yaml", tmp_path / "newer.yaml", tmp_path / "file"
    broken.write_text("plan: [")
    assert "is not YAML" in refused(broken, "--format", "deepspeed")
    newer.write_text(json.dumps({**plan_to_dict(make_plan()), "schema_version": 99}))
    assert "update dsplan" in refused(newer, "--format", "deepspeed")
    blocked.write_text("")
    assert "cannot be made" in refused(plan_file, "--format", "deepspeed", "--out", blocked / "below")
    sharded = tmp_path / "fsdp.yaml"
    save_plan(make_plan("fsdp"), sharded)
    assert "cannot be written as a DeepSpeed config" in refused(sharded, "--format", "deepspeed")
