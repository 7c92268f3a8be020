"""Plan files: what is written is read back whole; what is broken says where and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.errors import BrokenFile
from planner.search.search import recommend
from planner.types.plan_io import load_plan, plan_from_dict, plan_to_dict, save_plan
from tests.planner.search.questions import question


@pytest.fixture(scope="module")
def plan_dict() -> dict[str, object]:
    return plan_to_dict(recommend(question("opt-1.3b", "a100-80gb", 8)).plans[0])


def test_round_trip(tmp_path: Path, plan_dict: dict[str, object]) -> None:
    plan = plan_from_dict(plan_dict)
    save_plan(plan, tmp_path / "plan.yaml")
    assert plan_to_dict(load_plan(tmp_path / "plan.yaml")) == plan_dict
    assert json.loads(json.dumps(plan_dict)) == plan_dict
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("schema_version",), 99, "has plan schema 99, this dsplan reads up to 1; update dsplan"),
        (("schema_version",), None, "has no plan schema_version 1"),
        (("plan", "strategy"), "zeroo", "strategy 'zeroo' is not one of"),
        (("plan", "micro_batch_size"), 0, "must be a whole number of at least 1"),
        (("plan", "micro_batch_size"), "eight", "is 'eight', not a whole number"),
        (("plan", "gradient_accumulation_steps"), 7, "is not the global batch"),
        (("workload", "loss"), "chunky", "workload.loss: is 'chunky', not one of plain, chunked, fused"),
        (("workload", "lora_rank"), "eight", "workload.lora_rank: is 'eight', not a whole number"),
        (("plan", "colour"), "red", "has an unknown key 'colour'"),
        (("memory",), None, "is missing or not a mapping"),
        (("time", "step_seconds"), "fast", "not a number"),
        (
            ("cluster", "gpus"),
            16,
            "is 16, and the degrees of the plan (dp_replicate 8 x dp_shard 1 x cp 1 x tp 1 x pp 1) make 8",
        ),
        (("cluster", "gpus_per_node"), 4, "cluster.gpus: is 8, and nodes x gpus_per_node is 1 x 4"),
        (("memory", "parameters_bytes"), 10**30, "not a whole number from 0 on that fits in 64 bits; write"),
        (("time", "step_seconds"), 1e40, "is 1e+40, not a number from 0 to 1e+30; write"),
    ],
)
def test_broken_fields_are_named(
    tmp_path: Path, plan_dict: dict[str, object], keys: tuple[str, ...], value: object, message: str
) -> None:
    broken = json.loads(json.dumps(plan_dict))
    inner = broken
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(broken))
    with pytest.raises(BrokenFile) as caught:
        load_plan(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "just words", "[1, 2", "\x00", "a: [b"])
def test_text_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(BrokenFile):
        load_plan(path)


def test_missing_file_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="cannot be read"):
        load_plan(tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x9c")
    with pytest.raises(BrokenFile, match="is not text in UTF-8"):
        load_plan(tmp_path / "binary")
