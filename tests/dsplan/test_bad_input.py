"""Bad input is told in one line that names the remedy, with exit status 2 and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dsplan.cli import Cli

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 128}
RECOMMEND = "recommend --model opt-125m --gpus 2 --gpu A100-SXM4-80GB"
ESTIMATE = "estimate --model opt-125m --gpus 2 --gpu A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("recommend --model opt-6.7bb --gpus 8", ("opt-6.7bb", "opt-6.7b")),
        ("recommend --gpus 8", ("--model",)),
        ("recommend --model opt-125m --model-size 6.7B --gpus 8", ("--model", "--model-size")),
        ("recommend --model-size huge --gpus 8", ("huge", "6.7B")),
        ("recommend --model-size 0B --gpus 8", ("0B",)),
        ("recommend --model-size -3B --gpus 8", ("-3B",)),
        ("recommend --model-size 999999999999T --gpus 8", ("999999999999T",)),
        ("recommend --model opt-125m --gpu A1000-80GB --gpus 8", ("A1000-80GB", "dsplan devices")),
        ("recommend --model opt-125m --node-type dgx-a1000", ("dgx-a1000", "dgx-a100", "--nodes")),
        ("recommend --model opt-125m --task translate", ("translate", "causal-lm")),
        (f"{RECOMMEND} --task image-cls", ("--task image-cls", "use causal-lm or seq-cls")),
        ("recommend --model vit-base --gpus 1 --task masked-lm", ("--task masked-lm", "use image-cls")),
        (f"{RECOMMEND} --source-len 64", ("--source-len 64", "--seq-len")),
        ("recommend --model whisper-small --gpus 1 --source-len 64", ("--source-len 64",)),
        (f"{RECOMMEND} --precision bf17", ("bf17", "bf16")),
        (f"{RECOMMEND} --optimizer adam", ("adam", "adamw")),
        (f"{RECOMMEND} --objective speed", ("speed", "throughput")),
        ("recommend opt-6.7b --gpus 8", ("opt-6.7b", "--model opt-6.7b")),
        ("estimate opt-6.7b", ("opt-6.7b", "--model opt-6.7b")),
        (f"{RECOMMEND} --price 0", ("--price", "0")),
        (f"{RECOMMEND} --price inf", ("--price", "inf")),
        (f"{RECOMMEND} --tokens many", ("--tokens 'many'", "300B")),
        (f"{RECOMMEND} --deadline 14d", ("--deadline 14d", "--tokens 300B")),
        (f"{RECOMMEND} --tokens 1B --deadline soon", ("--deadline 'soon'", "36h", "14d")),
        ("recommend --model opt-125m --gpus 0", ("--gpus", "0")),
        ("recommend --model opt-125m --gpus -8", ("--gpus", "-8")),
        ("recommend --model opt-125m --gpus 99999999999999999999", ("--gpus", "99999999999999999999")),
        ("recommend --model opt-125m --gpus eight", ("--gpus", "eight")),
        ("recommend --model opt-125m --gpus 8 --nodes 0", ("--nodes", "0")),
        (f"{RECOMMEND} --seq-len 0", ("--seq-len",)),
        (f"{RECOMMEND} --seq-len 1e4", ("--seq-len", "1e4")),
        (f"{RECOMMEND} --seq-len 8kk", ("--seq-len", "8kk", "8k (8192)")),
        (f"{RECOMMEND} --seq-len 0.3k", ("--seq-len", "0.3k", "8k (8192)")),
        (f"{RECOMMEND} --seq-len k", ("--seq-len", "'k'", "8k (8192)")),
        (f"{RECOMMEND} --seq-len 900M", ("--seq-len", "900000000")),
        (f"{RECOMMEND} --gpus 8k", ("--gpus", "8k")),
        (f"{RECOMMEND} --interconnect ib-hdr", ("--interconnect ib-hdr", "one node", "--nodes")),
        (f"{RECOMMEND} --seq-len 100000", ("--seq-len", "2048")),
        (f"{RECOMMEND} --global-batch -1", ("--global-batch",)),
        (f"{RECOMMEND} --global-batch 10000000000000", ("--global-batch",)),
        (f"{ESTIMATE} --strategy ddp --global-batch 7", ("7", "6 or 8")),
        (f"{RECOMMEND} --max-memory-gb nan", ("--max-memory-gb", "nan")),
        (f"{RECOMMEND} --max-memory-gb 0", ("--max-memory-gb",)),
        (f"{RECOMMEND} --host-memory-gb inf", ("--host-memory-gb", "inf")),
        (f"{RECOMMEND} --top 0", ("--top",)),
        ("recommend --model opt-125m --gpus 8 --nodes 3 --gpu H100-SXM5-80GB", ("8", "3")),
        ("recommend --model opt-125m --cluster no-such.yaml", ("no-such.yaml",)),
        ("recommend --model no-such-directory/config.json --gpus 8", ("no-such-directory/config.json",)),
        ("recommend --model no_such_package.module:factory --gpus 8", ("no_such_package",)),
        (f"{ESTIMATE} --strategy zero4", ("zero4", "zero3")),
        (f"{ESTIMATE} --strategy zero1 --backend torch", ("zero1", "deepspeed")),
        (f"{ESTIMATE} --strategy ddp --offload optimizer", ("ddp", "offload")),
        (f"{ESTIMATE} --strategy single", ("single", "2")),
        (f"{ESTIMATE} --strategy hsdp", ("hsdp", "fsdp")),
        (f"{ESTIMATE} --strategy zero3 --backend deepspeed --pp 2", ("zero3", "pp 2", "use zero1")),
        (f"{ESTIMATE} --tp 3", ("--tp 3", "2 GPUs")),
        (f"{ESTIMATE} --micro-batch 3 --global-batch 32", ("32", "30 or 36")),
        (f"{ESTIMATE} --micro-batch 3 --grad-accum 2 --global-batch 32", ("32", "leave one out")),
        (f"{ESTIMATE} --micro-batch 0", ("--micro-batch",)),
        ("devices --links --nodes", ("--links", "--nodes")),
        ("models --bogus", ("--bogus",)),
        ("recomend", ("recomend", "recommend")),
        ("db", ("db",)),
        ("explain", ("PLAN",)),
    ],
)
def test_bad_flags(cli: Cli, line: str, words: tuple[str, ...]) -> None:
    message = cli.refuses(line)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("estimate --gpus two", "--gpus is 'two'; give a whole number from 1 to 1,000,000; see dsplan estimate --help"),
        ("estimate --gpus 0", "--gpus is 0; give a whole number from 1 to 1,000,000; see dsplan estimate --help"),
        (
            f"{RECOMMEND} --max-memory-gb x",
            "--max-memory-gb is 'x'; give a number from 0.001 to 1,000,000; see dsplan recommend --help",
        ),
        (
            f"{RECOMMEND} --precision bf17",
            "--precision is 'bf17'; give one of fp32, bf16, fp16, bf16-pure, fp8, fp4; see dsplan recommend --help",
        ),
        ("explain", "PLAN is missing; give it a value; see dsplan explain --help"),
        (
            f"{RECOMMEND} --host-memory-gb 0",
            "--host-memory-gb is 0.0; give a number from 0.001 to 1,000,000; see dsplan recommend --help",
        ),
    ],
)
def test_a_flag_is_told_what_it_takes(cli: Cli, line: str, message: str) -> None:
    assert cli.refuses(line) == f"dsplan: {message}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", ("JSON",)),
        ("[]", ()),
        ("", ("JSON",)),
        ("{}", ("model_type",)),
        (json.dumps({key: value for key, value in CONFIG.items() if key != "n_layer"}), ("n_layer",)),
        (json.dumps({**CONFIG, "n_embd": "wide"}), ("n_embd",)),
        (json.dumps({**CONFIG, "n_embd": 0}), ("n_embd",)),
    ],
)
def test_bad_config_json(cli: Cli, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    message = cli.refuses("recommend --gpus 1 --gpu A100-SXM4-80GB --model", config)
    assert str(config) in message
    assert all(word in message for word in words), message


def test_an_unknown_model_type_says_how_to_plan_for_it(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "model_type": "no-such-type"}))
    message = cli.refuses("recommend --gpus 1 --gpu A100-SXM4-80GB --model", config)
    assert "no-such-type" in message
    assert "package.module:factory" in message


def test_a_good_config_json_is_planned_for(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    printed = cli("recommend --json --gpus 1 --gpu A100-SXM4-80GB --model", config)
    assert printed.status == 0
    assert printed.json["plans"]


@pytest.mark.parametrize("command", ["explain", "emit --format torchrun", "run --plan"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("YAML",)),
        ("- 1", ("not a plan",)),
        ("\x00\xff", ()),
        ("schema_version: 999", ("999", "update dsplan")),
        ("schema_version: one", ("schema_version",)),
        ("schema_version: 1", ("plan",)),
    ],
)
def test_bad_plans(cli: Cli, tmp_path: Path, command: str, text: str, words: tuple[str, ...]) -> None:
    plan, script = tmp_path / "plan.yaml", tmp_path / "train.py"
    plan.write_text(text, encoding="latin-1")
    script.write_text("import dsplan\n\ndsplan.initialize\n")
    message = cli.refuses(command, plan, *([script] if command.startswith("run") else []))
    assert str(plan) in message
    assert all(word in message for word in words), message


def test_a_plan_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    assert "No such file" in cli.refuses("explain", tmp_path / "gone.yaml")


def test_out_must_be_a_directory_that_can_be_written(cli: Cli, tmp_path: Path) -> None:
    occupied = tmp_path / "plans"
    occupied.write_text("a file")
    assert str(occupied) in cli.refuses(f"{RECOMMEND} --out", occupied)


def test_an_error_with_json_is_still_one_line_on_stderr(cli: Cli) -> None:
    assert "opt-6.7bb" in cli.refuses("recommend --json --model opt-6.7bb --gpus 8")


def test_a_bug_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("planner.search.search.recommend", broken)
    with pytest.raises(ZeroDivisionError):
        cli(RECOMMEND)
