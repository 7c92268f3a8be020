"""`dsplan estimate --exact`: from the flag to an answer that is traced once."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsplan
from dsplan.__main__ import main
from dsplan.exact import cache
from dsplan.render.show import progress
from hardware_db.store import open_store
from hardware_db.units import MIB
from tests.dsplan.cli import Cli, Printed

HARDWARE = "--gpu H100-SXM5-80GB --seq-len 64 --precision bf16"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    return config


def upper_margin(plan: Any) -> float:
    """Return how far the upper bound is above the tensors' peak."""
    memory = plan["memory"]
    return float(memory["device_used_upper_bytes"] - memory["peak_allocated_bytes"])


def traced_rows() -> int:
    """Answers in the database: every query of a key that was traced."""
    with open_store() as store:
        return len(store._connection.execute("SELECT key FROM traces").fetchall())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "who"),
    [
        ("--gpus 1 --micro-batch 2", "of LlamaForCausalLM (torch"),
        ("--gpus 8 --strategy fsdp --micro-batch 2", "of LlamaForCausalLM on rank 0 of 8 (torch"),
        (
            "--gpus 2 --strategy ddp --micro-batch 2 --optimizer adamw-fused --checkpointing full",
            "on rank 0 of 2 (torch",
        ),
    ],
)
@pytest.mark.sweep(every=3)
def test_memory_is_that_of_a_trace(cli: Cli, model: Path, line: str, who: str) -> None:
    command = f"estimate {HARDWARE} {line} --json --model"
    closed, printed = cli(command, model), cli(command, model, "--exact")
    assert (printed.status, printed.err) == (0, "")
    plan = printed.json
    assert plan["provenance"] == {**closed.json["provenance"], "memory": "traced"}
    assert {"forward", "loss", "backward", "step"} <= plan["memory"]["phases"].keys()
    assert max(plan["memory"]["phases"].values()) == plan["memory"]["peak_allocated_bytes"]
    assert plan["memory"]["peak_allocated_bytes"] != closed.json["memory"]["peak_allocated_bytes"]
    assert upper_margin(plan) < upper_margin(closed.json)
    assert plan["time"] == closed.json["time"]
    assert who in plan["notes"][0]
    assert "; the closed form" in plan["notes"][0]


def test_a_second_question_is_answered_without_torch(cli: Cli, model: Path) -> None:
    line = f"estimate {HARDWARE} --gpus 1 --exact --json --model {quoted(model)}"
    first = cli(line)
    again = (
        "import sys; from dsplan.__main__ import main; status = main(sys.argv[1:]);"
        " assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", again, *shlex.split(line)]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout == first.out
    assert traced_rows() == 1


CHANGES = ["--seq-len 65", "--micro-batch 2", "--precision fp32", "--optimizer sgd", "--attention eager"]
CHANGES += ["--checkpointing full", "--gpu A100-SXM4-80GB", "--task seq-cls", "--gpu cpu"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_answer_is_asked_anew(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    from dsplan.exact import answer
    from dsplan.exact.reading import Refusal, sizes_of

    jobs = []

    def trace_answer(job: Any, *_: Any) -> Refusal:
        jobs.append(job)
        return Refusal(sizes=sizes_of(job), reason="a test")

    monkeypatch.setattr(answer, "trace_answer", trace_answer)
    line = f"estimate {HARDWARE} --gpus 1 --exact --json --model {quoted(model)}"
    cli(line)
    cli(f"{line} --max-memory-gb 10 --host-memory-gb 10")
    assert len(jobs) == 1
    cli(f"{line} {change}")
    assert len(jobs) == 2


@pytest.mark.slow
def test_another_micro_batch_follows_from_two(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"estimate {HARDWARE} --gpus 2 --strategy fsdp --exact --json --model {quoted(model)} --micro-batch"
    cli(line, 16)
    cli(line, 32)
    printed = cli(line, 64)
    assert "memory is extrapolated from traces at micro-batch 16 and 32 (torch" in printed.json["notes"][0]
    assert traced_rows() == 2
    monkeypatch.setenv("DSPLAN_HOME", str(model.parent / "another-home"))
    direct = cli(line, 64)
    assert "memory is a trace" in direct.json["notes"][0]
    for name, size in direct.json["memory"]["phases"].items():
        assert printed.json["memory"]["phases"][name] == pytest.approx(size, rel=0.01), name


@pytest.mark.slow
def test_another_length_follows_from_three(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"estimate {HARDWARE} --gpus 1 --attention eager --micro-batch 16 --exact --json --model {quoted(model)}"
    line += " --seq-len"
    for length in (320, 352, 384):
        cli(line, length)
    printed = cli(line, 400)
    assert "extrapolated from traces at sequence length 320, 352 and 384" in printed.json["notes"][0]
    monkeypatch.setenv("DSPLAN_HOME", str(model.parent / "another-home"))
    direct = cli(line, 400)
    # What the allocator does not split off its blocks, a few MiB, only a trace of that length knows.
    unsplit = direct.json["memory"]["peak_allocated_bytes"] - printed.json["memory"]["peak_allocated_bytes"]
    assert 0 <= unsplit <= 6 * MIB


def test_what_the_trace_does_not_cover_is_said(cli: Cli, model: Path) -> None:
    command = f"estimate {HARDWARE} --gpus 4 --strategy ddp --code torchtitan --json --model"
    closed, plan = cli(command, model).json, cli(command, model, "--exact").json
    note = "the trace does not cover --code torchtitan; the closed form is used, with a wider bound"
    assert note in plan["notes"]
    assert plan["provenance"] == closed["provenance"]
    assert upper_margin(plan) > upper_margin(closed)


def test_zero_takes_its_activations_from_a_trace(cli: Cli, model: Path) -> None:
    command = f"estimate {HARDWARE} --gpus 4 --strategy zero3 --json --model"
    closed, plan = cli(command, model).json, cli(command, model, "--exact").json
    note = "the trace does not run zero3: its activations are traced, its states and buffers are closed forms"
    assert note in plan["notes"]
    assert plan["provenance"]["memory"] == "traced"
    assert plan["memory"]["phases"]["step"] == closed["memory"]["phases"]["step"]
    assert plan["memory"]["phases"]["loss"] != closed["memory"]["phases"]["loss"]


def test_without_torch_one_line_says_what_to_install(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_version", lambda package: "")
    message = cli.refuses(f"estimate {HARDWARE} --gpus 1 --exact --model", model)
    assert message == (
        "dsplan: --exact traces the model with torch, which is not installed; pip install 'dsplan[train]'\n"
    )


def test_an_interrupted_trace_leaves_nothing(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsplan.exact import answer

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    line = f"estimate {HARDWARE} --gpus 1 --exact --model {quoted(model)}"
    with monkeypatch.context() as patched:
        patched.setattr(answer, "trace_step", interrupted)
        printed = cli(line)
    assert printed == Printed(status=130, out="", err="")
    assert traced_rows() == 0
    assert cli(line).status == 0


def test_scripts_ask_the_same(model: Path) -> None:
    plan = dsplan.estimate(model=str(model), gpus=1, gpu="H100-SXM5-80GB", seq_len=64, exact=True)
    assert plan.provenance["memory"] == "traced"
    assert traced_rows() == 1


def test_a_terminal_is_told_what_is_done_and_a_pipe_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress() as report:
        report("tracing")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress() as report:
        report("tracing")
    out, err = capsys.readouterr()
    assert out == ""
    assert "tracing" in err


def test_a_database_that_cannot_be_used_is_said_and_changes_nothing(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(model))
    printed = cli(f"estimate {HARDWARE} --gpus 1 --exact --json --model", model)
    assert printed.json["provenance"]["memory"] == "traced"
    assert any(note.startswith("traces are not kept: ") for note in printed.json["notes"])
    assert main(["estimate", "--model", str(model), "--gpus", "1", "--gpu", "H100-SXM5-80GB"]) == 0
