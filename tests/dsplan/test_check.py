"""`dsplan check` on small configs: verdict, findings, the diff and the file that it writes, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
import yaml

from tests.dsplan.cli import Cli

AXOLOTL = """\
# how we train
base_model: meta-llama/Llama-3.1-8B
datasets:
  - path: tatsu-lab/alpaca   # public
sequence_len: 2048
micro_batch_size: 16   # what fitted on the other card
gradient_accumulation_steps: 1
optimizer: adamw_bnb_8bit
bf16: true
gradient_checkpointing: false
flash_attention: true
deepspeed: deepspeed_configs/zero2.json
"""
CARD = "--gpus 8 --gpu A100-SXM4-80GB"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.yaml"
    path.write_text(AXOLOTL)
    return path


def test_json_says_what_the_contract_says(cli: Cli, config: Path) -> None:
    printed = cli(f"check train.yaml {CARD} --json")
    answer = printed.json
    assert printed.status == 1
    assert answer["schema_version"] == 1
    assert (answer["format"], answer["files"]) == ("axolotl", ["train.yaml"])
    assert {"key": "micro_batch_size", "file": "train.yaml", "line": 6, "field": "micro_batch", "value": 16} in answer[
        "read"
    ]
    assert {item["key"] for item in answer["unread"]} == {"datasets.0.path"}
    assert answer["question"]["micro_batch"] == 16
    assert answer["question"]["gpus"] == 8
    assert answer["estimate"]["verdict"] == "does_not_fit"
    worst = answer["findings"][0]
    assert (worst["severity"], worst["id"]) == ("error", "does-not-fit")
    best = answer["best"]
    assert best["plan"]["verdict"] == "fits"
    assert best["gain"] is None
    assert best["plan"]["plan"]["global_batch_size"] == answer["estimate"]["plan"]["global_batch_size"]
    assert best["diff"].startswith("--- train.yaml\n+++ train.yaml\n")


def test_a_report_has_what_the_text_has(cli: Cli, config: Path) -> None:
    pytest.importorskip("plotly", reason="needs plotly (extra report)")
    printed = cli(f"check train.yaml {CARD} --report page.html")
    assert (printed.status, printed.out) == (1, "")
    assert "page.html: train.yaml: does not fit" in printed.err
    page = Path("page.html").read_text(encoding="utf-8")
    answer = cli(f"check train.yaml {CARD} --json").json
    for finding in answer["findings"]:
        assert escape(finding["message"]) in page
    assert escape(answer["best"]["diff"]) in page
    drawn = json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    steps = drawn["figures"]["seconds"]["data"][-1]["x"]
    assert steps == [plan["time"]["step_seconds"] for plan in (answer["estimate"], answer["best"]["plan"])]
    assert cli(f"check . {CARD} --report folder.html").status == 1
    assert "1 files: 0 fit, 1 do not" in Path("folder.html").read_text(encoding="utf-8")


def test_the_question_is_that_of_estimate(cli: Cli, config: Path) -> None:
    """The estimate is the one that `dsplan estimate` gives for the flags of `question`."""
    answer = cli(f"check train.yaml {CARD} --json").json
    estimate = cli(
        f"estimate --model llama-3.1-8b {CARD} --seq-len 2048 --micro-batch 16 --grad-accum 1 --optimizer adamw-8bit"
        " --precision bf16 --attention flash --strategy zero2 --backend deepspeed --json"
    ).json
    assert answer["estimate"]["plan"] == estimate["plan"]
    assert answer["estimate"]["memory"] == estimate["memory"]


def test_what_is_tight_is_no_error_and_its_fix_has_room(cli: Cli, config: Path) -> None:
    config.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
        "deepspeed: examples/deepspeed/ds_z2_config.json\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 16\nbf16: true\n"
    )
    printed = cli("check train.yaml --gpus 1 --gpu RTX-3060-12GB --json")
    answer = printed.json
    assert (printed.status, answer["estimate"]["verdict"]) == (0, "tight")
    worst = answer["findings"][0]
    assert (worst["severity"], worst["id"]) == ("warning", "tight")
    assert worst["message"].startswith("may not fit: needs up to ")
    assert (answer["best"]["plan"]["verdict"], answer["best"]["gain"]) == ("fits", None)
    assert "which fits with room" in cli("check train.yaml --gpus 1 --gpu RTX-3060-12GB").out


def test_the_fix_fits_and_touches_only_what_it_must(cli: Cli, config: Path, tmp_path: Path) -> None:
    diff = cli(f"check train.yaml {CARD} --fix").out
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    assert {line[1:].partition(":")[0] for line in changed} <= {
        *("micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "deepspeed"),
    }
    cli(f"check train.yaml {CARD} --out fixed.yaml")
    fixed = (tmp_path / "fixed.yaml").read_text()
    assert config.read_text() == AXOLOTL
    assert "# how we train" in fixed
    assert "- path: tatsu-lab/alpaca   # public" in fixed
    assert "   # what fitted on the other card" in fixed
    assert cli(f"check fixed.yaml {CARD} --json").status == 0
    subprocess.run(["patch", "-p0", "--quiet"], input=diff, text=True, check=True, cwd=tmp_path)
    assert config.read_text() == fixed


def test_a_script_is_fixed_where_its_variable_is_set(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "BATCH=64\nswift sft \\\n  --model Qwen/Qwen2.5-7B \\\n  --per_device_train_batch_size $BATCH \\\n"
    script += "  --gradient_accumulation_steps 1 --max_length 2048 --tuner_type lora\n"
    (tmp_path / "train.sh").write_text(script)
    printed = cli("check train.sh --gpus 1 --gpu A100-SXM4-40GB --json").json
    assert printed["estimate"]["verdict"] == "does_not_fit"
    diff = printed["best"]["diff"]
    assert "-BATCH=64\n" in diff
    assert "gradient_accumulation_steps 1 " in diff


def test_trl_shards_where_its_weights_in_fp32_do_not_fit(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, cards = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: imdb\n", "--gpus 8 --gpu RTX-3060-12GB"
    (tmp_path / "train.yaml").write_text(text)
    assert cli(f"check train.yaml {cards} --json").status == 1
    assert cli(f"check train.yaml {cards} --out fixed.yaml").status in (0, 1)
    assert "\nfsdp: true\n" in (tmp_path / "fixed.yaml").read_text()
    assert cli(f"check fixed.yaml {cards} --json").status == 0
    (tmp_path / "train.yaml").write_text(f"{text}deepspeed: z1.json\n")
    (tmp_path / "z1.json").write_text('{"zero_optimization": {"stage": 1}}')
    beside = cli(f"check train.yaml {cards} --json")
    assert beside.status == 1
    assert "fsdp" not in (beside.json["best"] or {}).get("diff", "")


def test_text(cli: Cli, config: Path) -> None:
    printed = cli(f"check train.yaml {CARD}")
    assert printed.status == 1
    for words in (
        "what was read",
        "micro_batch_size",
        "does not fit",
        "findings",
        "the same trainer can run this",
        "--fix",
    ):
        assert words in printed.out, words


def test_a_command(cli: Cli) -> None:
    line = (
        "check --gpu A100-SXM4-80GB --json -- torchrun --nproc_per_node 4 run_clm.py --model_name_or_path gpt2 --bf16"
    )
    printed = cli(f"{line} --block_size 512 --per_device_train_batch_size 4 --max_steps 10")
    assert printed.status == 0
    assert printed.json["question"]["gpus"] == 4
    assert printed.json["steps"] == 10
    assert printed.json["files"] == ["the command"]


def test_a_card_without_bf16(cli: Cli, config: Path) -> None:
    findings = cli("check train.yaml --gpus 8 --gpu V100-SXM2-32GB --json").json["findings"]
    assert "no-bf16" in {item["id"] for item in findings}


_DEEPSPEED = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
_ON_EIGHT = "--model opt-1.3b --seq-len 512 --gpus 8 --gpu A100-SXM4-40GB"


@pytest.fixture
def in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _batch(total: int, micro: int | None, accumulation: int | None) -> dict[str, int]:
    sizes = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro}
    sizes |= {"gradient_accumulation_steps": accumulation}
    return {key: value for key, value in sizes.items() if value is not None}


@pytest.mark.parametrize(
    ("batch", "message", "mended"),
    [
        ((100, 4, 2), "triple does not multiply: micro-batch 4 x accumulation 2 x 8 ranks = 64 is not 100", 64),
        ((100, 2, None), "the global batch 100 is no multiple of micro-batch 2 x 8 ranks", 96),
        ((100, None, 4), "the global batch 100 is no multiple of accumulation 4 x 8 ranks", 96),
        ((4, None, None), "the global batch 4 is no multiple of 8 ranks", 8),
    ],
)
def test_a_batch_that_does_not_multiply_is_refused_and_mended(
    cli: Cli, in_place: Path, batch: tuple[int, int | None, int | None], message: str, mended: int
) -> None:
    Path("ds.json").write_text(json.dumps({**_batch(*batch), **_DEEPSPEED}, indent=1))
    printed = cli(f"check ds.json {_ON_EIGHT} --json")
    assert printed.status == 1
    (finding,) = [item for item in printed.json["findings"] if item["id"] == "batch-triple"]
    assert (finding["severity"], finding["key"], finding["line"]) == ("error", "train_batch_size", 2)
    assert message in finding["message"]
    assert printed.json["estimate"]["plan"]["global_batch_size"] == mended
    cli(f"check ds.json {_ON_EIGHT} --out fixed.json")
    assert json.loads(Path("fixed.json").read_text())["train_batch_size"] == mended
    fixed = cli(f"check fixed.json {_ON_EIGHT} --json")
    assert (fixed.status, fixed.json["estimate"]["plan"]["global_batch_size"]) == (0, mended)


def test_a_fix_that_shrinks_the_micro_batch_keeps_a_triple_that_multiplies(cli: Cli, in_place: Path) -> None:
    """The trainer counts 4 x 2 x 8 samples: so many stay where a GPU takes fewer at a time."""
    cards = "--model llama-3.1-8b --gpus 8 --gpu H100-SXM5-80GB"
    zero2 = {**_DEEPSPEED, "zero_optimization": {"stage": 2}}
    Path("ds.json").write_text(json.dumps({**_batch(100, 4, 2), **zero2}, indent=1))
    cli(f"check ds.json {cards} --out fixed.json")
    fixed = json.loads(Path("fixed.json").read_text())
    assert fixed["train_micro_batch_size_per_gpu"] < 4
    assert fixed["train_micro_batch_size_per_gpu"] * fixed["gradient_accumulation_steps"] * 8 == 64
    assert fixed["train_batch_size"] == 64
    assert cli(f"check fixed.json {cards} --json").status == 0


@pytest.mark.parametrize(
    ("name", "text", "fp16"),
    [
        (
            "ds.json",
            json.dumps({**_batch(64, 2, 4), **_DEEPSPEED, "fp16": {"enabled": True}}),
            '"fp16": {"enabled": false',
        ),
        (
            "train.yaml",
            "model_name_or_path: gpt2\nper_device_train_batch_size: 2\nbf16: true\nfp16: true\n",
            "fp16: false",
        ),
    ],
)
def test_bf16_beside_fp16_is_refused(cli: Cli, in_place: Path, name: str, text: str, fp16: str) -> None:
    Path(name).write_text(text)
    printed = cli(f"check {name} {_ON_EIGHT} --json")
    (error,) = [item for item in printed.json["findings"] if item["severity"] == "error"]
    assert (printed.status, error["id"]) == (1, "two-precisions")
    assert printed.json["estimate"]["plan"]["precision"].startswith("bf16")
    cli(f"check {name} {_ON_EIGHT} --out fixed-{name}")
    assert fp16 in Path(f"fixed-{name}").read_text()
    assert cli(f"check fixed-{name} {_ON_EIGHT} --json").status == 0


def test_what_a_trainer_refuses_is_no_file_that_fits(cli: Cli, config: Path) -> None:
    """A key of axolotl's that stands beside another is left out; one that nothing puts right is named."""
    small = AXOLOTL.replace("Llama-3.1-8B", "Llama-3.2-1B").replace(": 16 ", ": 1 ")
    config.write_text(f"{small}batch_size: 1\nadapter: qlora\nload_in_4bit: false\n")
    ids = {
        item["id"] for item in cli(f"check train.yaml {CARD} --json").json["findings"] if item["severity"] == "error"
    }
    assert ids == {"two-batches", "contradiction"}
    printed = cli(f"check . {CARD}")
    assert printed.status == 1
    assert "1 files: 0 fit, 1 do not" in printed.out
    assert "cannot run" in printed.out
    changed = cli(f"check train.yaml {CARD} --fix")
    assert "+batch_size: null\n" in changed.out
    assert "an error that stays: adapter: qlora needs load_in_4bit: true" in changed.err


def test_no_model(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(AXOLOTL.replace("meta-llama/Llama-3.1-8B", "ours/Secret"))
    printed = cli(f"check train.yaml {CARD} --json")
    assert printed.status == 2
    assert printed.json["estimate"] is None
    assert "Secret" in printed.json["why"]
    assert printed.json["read"]
    (tmp_path / "train.yaml").write_text(AXOLOTL.replace("meta-llama/Llama-3.1-8B", "ours/Secret-7B"))
    assert "model-by-size" in {item["id"] for item in cli(f"check train.yaml {CARD} --json").json["findings"]}


def test_a_folder_is_a_table(cli: Cli, config: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: 'x\n")
    (tmp_path / "small.yaml").write_text(AXOLOTL.replace("Llama-3.1-8B", "Llama-3.2-1B").replace(": 16 ", ": 1 "))
    printed = cli(f"check . {CARD}")
    assert printed.status == 1
    assert "3 files: 1 fit, 1 do not, 1 without an estimate" in printed.out
    assert cli(f"check . {CARD} --json").json[0]["why"].startswith("line 2: is not YAML")


ROOT = Path(__file__).parents[2]


def test_the_hook_of_pre_commit(cli: Cli, config: Path, tmp_path: Path) -> None:
    """Files that are handed over together are as many trainings; what is none of a trainer's fails no commit."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command = hook["entry"].removeprefix("dsplan ")
    (tmp_path / "small.yaml").write_text(AXOLOTL.replace("Llama-3.1-8B", "Llama-3.2-1B").replace(": 16 ", ": 1 "))
    (tmp_path / "other.yaml").write_text("on: push\njobs: {}\n")
    assert all(re.search(hook["files"], name) for name in ("train.yaml", "train.sh", "ds.json"))
    assert cli(f"{command} {CARD} small.yaml other.yaml").status == 0
    printed = cli(f"{command} {CARD} small.yaml train.yaml other.yaml")
    assert printed.status == 1
    assert "3 files: 1 fit, 1 do not, 1 without an estimate" in printed.out


def test_the_action_fails_where_a_config_does_not_fit(config: Path, tmp_path: Path) -> None:
    """Its own step, run by bash as GitHub's runner does."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    *_, step = action["runs"]["steps"]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "dsplan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dsplan "$@"\n')
    (programs / "dsplan").chmod(0o755)
    given = {"PATHS": ".", "GPUS": "8", "GPU": "A100-SXM4-80GB", "ARGUMENTS": "--max-memory-gb 70"}
    assert given.keys() == step["env"].keys()
    environment = {
        **os.environ, **given, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PYTHONPATH": str(ROOT),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }  # fmt: skip
    ended = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    assert "does not fit" in ended.stdout
    assert "train.yaml" in (tmp_path / "summary.md").read_text()


def _aliases(line: str) -> str:
    """Nine keys, each with nine times the one before: 9^10 values when they are written out."""
    names = "abcdefghij"
    return "".join(
        f"{now}: &{now} " + line.format(", ".join([f"*{before}"] * 9)) + "\n"
        for before, now in itertools.pairwise(names)
    )


MAXTEXT = """\
model_name: llama2-7b
remat_policy: full
max_target_length: 2048
ici_fsdp_parallelism: 8
per_device_batch_size: """
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
"""
BROKEN: dict[str, str | bytes] = {
    "indent.yaml": "base_model: a\n  sequence_len: 1\n",
    "tab.yaml": "base_model: a\nnested:\n\tb: 1\n",
    "misspelt.yaml": "base_modle: a\nsequence_len: 1\n",
    "text.yaml": AXOLOTL.replace("micro_batch_size: 16", "micro_batch_size: sixteen"),
    "negative.yaml": AXOLOTL.replace("micro_batch_size: 16", "micro_batch_size: -1"),
    "documents.yaml": f"{AXOLOTL}---\n{AXOLOTL}",
    "anchor.yaml": "a: &x 1\nb: *y\n",
    "python.yaml": "base_model: !!python/object/apply:os.system ['touch made']\n",
    "python_name.yaml": "base_model: !!python/name:os.system\n",
    "open.yaml": 'base_model: "a\n',
    "list.yaml": "- a\n- b\n",
    "text_only.yaml": "hello\n",
    "bomb.yaml": "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "comma.json": '{"zero_optimization": {"stage": 1},}',
    "comment.json": '{"zero_optimization": {"stage": 1} // one\n}',
    "open.json": '{"zero_optimization": {"stage": 1}',
    "twice.json": '{"fp16": {}, "fp16": {}}',
    "list.json": "[]",
    "stage.json": '{"zero_optimization": {"stage": "three"}, "bf16": {"enabled": true}}',
    "quote.sh": "swift sft --model 'x\n",
    "bracket.sh": "A=(1 2\nswift sft --model x\n",
    "substitution.sh": "$(touch made)\n",
    "rm.sh": "python $(rm -rf made) `touch made`\n",
    "nothing.sh": "echo hello\n",
    "heredoc.sh": "cat <<EOF\nx\n",
    "infer.sh": "swift infer --model x\n",
    "binary.yaml": "\x00\x01",
    "empty.yaml": "",
    "laughs.yaml": AXOLOTL + "a: &a [x, x, x, x, x, x, x, x, x]\n" + _aliases("[{}]"),
    "merges.yaml": AXOLOTL + "a: &a {x: 1}\n" + _aliases("\n  <<: [{}]"),
    "itself.yaml": AXOLOTL + "a: &a\n  b: *a\n",
    "itself_merged.yaml": AXOLOTL + "a: &a\n  <<: *a\n",
    "key.yaml": "? [a, b]\n: c\n" + AXOLOTL,
    "infinite.yaml": AXOLOTL.replace("2048", ".inf"),
    "half.yaml": AXOLOTL.replace("2048", "2048.5"),
    "beyond.yaml": AXOLOTL.replace("2048", "1e30"),
    "digits.yaml": AXOLOTL.replace("16 ", f"{'9' * 5000} "),
    "minutes.yaml": AXOLOTL.replace("2048", "34:08"),
    "day.yaml": AXOLOTL.replace("2048", "2026-11-27"),
    "colour.yaml": AXOLOTL.replace("2048", '"\\e[31mred\\n\\rnew"'),
    "bell.yaml": AXOLOTL + "a: \x07\n",
    "windows.yaml": "a: 1\r\n  b: 2\r\n",
    "mark.yaml": b"\xef\xbb\xbfbase_model: a\nsequence_len: x\n",
    "utf16.yaml": AXOLOTL.encode("utf-16"),
    "utf16_without_mark.yaml": AXOLOTL.encode("utf-16-le"),
    "utf32.yaml": AXOLOTL.encode("utf-32"),
    "latin.yaml": AXOLOTL.encode() + "# caf\xe9".encode("latin-1"),
    "deep.json": '{"a":' * 5000 + "1" + "}" * 5000,
    "number.json": '{"zero_optimization": {"stage": ' + "9" * 5000 + "}}",
    "surrogate.json": '{"zero_optimization": {"stage": "\\ud800"}, "bf16": {"enabled": true}}',
    "twice.toml": "[training]\na = 1\n[training]\nb = 2\n",
    "deep.toml": "[model]\na = " + "[" * 5000 + "]" * 5000,
    "words.sh": "swift sft " + "--a b " * 50_000,
    "doubles.sh": "A=xx\n" + "A=$A$A\n" * 60 + "swift sft --model $A\n",
    "brackets.sh": "(" * 5000 + "\n",
    "eval.sh": 'eval \'touch made\'; bash -c "touch made"; python -c \'open("made", "w")\'\n',
    "fork.sh": ":(){ :|:& };:\n",
    "itself.sh": "source itself.sh\nswift sft --model x --per_device_train_batch_size x\n",
    "accumulation.yaml": AXOLOTL.replace("steps: 1", f"steps: {9 * 10**18}"),
    "rank.yaml": AXOLOTL + "adapter: lora\nlora_r: 99999999999\n",
    "mesh.yaml": MAXTEXT + "1e400\n",
    "samples.yaml": MAXTEXT + "-4\n",
    "copies.toml": TITAN + "data_parallel_replicate_degree = -2\n",
    "shards.toml": TITAN + "data_parallel_shard_degree = 0\n",
    "name.yaml": AXOLOTL.replace("meta-llama/Llama-3.1-8B", "a" * 100_000),
    "override.yaml": AXOLOTL.replace("steps: 1", "steps: \u202e1"),
    "nul.sh": "swift sft --model a\0b\n",
    "braces.sh": "torchrun sft.py --model_name_or_path a --per_device_train_batch_size {1..99999999999}\n",
    "calls.py": "def a() -> Trainer.Config:\n    return b()\ndef b():\n    return a()\n",
    "doubled.py": "def a() -> Trainer.Config:\n    x = 'a'\n"
    + "    x = x + x\n" * 60
    + "    return C.Config(steps=x)\n",
    "width.sh": "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8 --micro-batch-size 1 --seq-length 999999999\n",
    "sky.yaml": "resources: {accelerators: 'H100:8'}\nrun: |\n  rm -rf made\n",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.sweep(every=2)
def test_broken_files_are_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    content = BROKEN[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    line = cli.refuses(f"check {name} {CARD}")
    assert name in line
    assert os.listdir(tmp_path) == [name]


def test_fifo_and_large_files(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.yaml")
    (tmp_path / "large.yaml").write_text("a: 1\n" * 2_000_000)
    assert "no regular file" in cli.refuses("check fifo.yaml")
    assert "larger than 1 MiB" in cli.refuses("check large.yaml")
    assert "unknown format" in cli.refuses("check large.yaml --format yaml")
    assert "no file is named" in cli.refuses("check")
    assert "No such file" in cli.refuses("check none.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert "cannot be read" in cli.refuses("check loop.yaml")


def test_what_a_config_names_is_read_inside_of_its_folder_only(
    cli: Cli, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO, a link that leads out, a device and the file itself are named as DeepSpeed configs: none holds it up."""
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    os.mkfifo(inner / "fifo.json")
    (tmp_path / "secret.json").write_text('{"zero_optimization": {"stage": 3}}')
    (inner / "link.json").symlink_to(tmp_path / "secret.json")
    for name in ("fifo.json", "link.json", "../secret.json", "/dev/zero", "train.yaml"):
        (inner / "train.yaml").write_text(AXOLOTL.replace("deepspeed_configs/zero2.json", name))
        printed = cli(f"check train.yaml {CARD} --json")
        assert printed.status in (1, 2), name
        if printed.status == 1:
            assert printed.json["question"].get("strategy") != "zero3", name
            assert "deepspeed" in {item["key"] for item in printed.json["unread"]}, name


def test_recommend_takes_the_question_from_a_config(cli: Cli, config: Path, tmp_path: Path) -> None:
    """The plans are those of the same question in flags; a flag beside the config stands in the config's place."""
    answer = cli(f"recommend --config train.yaml {CARD} --json").json
    flags = "--seq-len 2048 --precision bf16 --optimizer adamw-8bit --attention flash"
    same = cli(f"recommend --model llama-3.1-8b {CARD} {flags} --global-batch 128 --json").json
    assert answer["plans"]
    assert [plan["plan"] for plan in answer["plans"]] == [plan["plan"] for plan in same["plans"]]
    lora = AXOLOTL + "adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    (tmp_path / "lora.yaml").write_text(lora)
    whole = cli(f"recommend --config lora.yaml --method full --model opt-1.3b --seq-len 512 {CARD} --json").json
    assert {plan["workload"]["method"] for plan in whole["plans"]} == {"full"}
    assert {plan["plan"]["sequence_length"] for plan in whole["plans"]} == {512}
    printed = cli(f"recommend --config train.yaml {CARD}")
    assert "train.yaml, axolotl's: seq_len 2048" in " ".join(printed.out.split())
    (tmp_path / "small.yaml").write_text(AXOLOTL.replace("meta-llama/Llama-3.1-8B", "ours/Secret-7B"))
    assert "a decoder like LLaMA of 7B is counted" in " ".join(cli(f"recommend --config small.yaml {CARD}").out.split())
    assert "no such file" in cli.refuses("recommend --config none.yaml").lower()


def test_planning_needs_no_reader(tmp_path: Path) -> None:
    """`recommend` imports nothing of `check`."""
    code = (
        "import sys; from dsplan.__main__ import main;"
        "main(['recommend', '--model', 'opt-125m', '--gpus', '2', '--json']);"
        "ours = ('planner.read', 'planner.search.audit', 'dsplan.checking');"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    json.loads(out[: out.rindex("[]")])
