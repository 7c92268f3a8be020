"""The text that the commands print, and the JSON that scripts rely on."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

import dsplan
from dsplan.cli.app import COMMANDS, EXAMPLES, load_command
from hardware_db.units import format_bytes
from planner.types.plan_io import load_plan, plan_from_dict
from tests.dsplan.cli import Cli

HARDWARE = "--gpus 8 --gpu A100-SXM4-80GB"
CONTRACT = {
    "model": {"name", "parameters", "trainable_parameters"},
    "cluster": {"device", "gpus", "nodes", "capacity_bytes"},
    "plan": {
        "strategy",
        "backend",
        "dp_replicate",
        "dp_shard",
        "tp",
        "pp",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "sequence_length",
        "precision",
        "optimizer",
        "attention",
        "activation_checkpointing",
        "offload",
    },
    "memory": {
        "parameters_bytes",
        "gradients_bytes",
        "optimizer_bytes",
        "activations_bytes",
        "buffers_bytes",
        "temporaries_bytes",
        "peak_allocated_bytes",
        "peak_phase",
        "peak_reserved_bytes",
        "device_overhead_bytes",
        "device_used_bytes",
        "device_needed_bytes",
        "device_used_upper_bytes",
        "host_bytes_per_node",
    },
    "time": {
        "step_seconds",
        "compute_seconds",
        "communication_seconds",
        "exposed_communication_seconds",
        "offload_seconds",
        "optimizer_seconds",
        "bubble_seconds",
    },
    "throughput": {"tokens_per_second_per_gpu", "samples_per_second", "tflops_per_gpu", "mfu"},
}


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"dsplan {dsplan.__version__}\n"


@pytest.mark.parametrize("line", ["", "--help"])
def test_help_lists_every_command(cli: Cli, line: str) -> None:
    printed = cli(line)
    assert printed.status == 0
    assert all(f"\n  {name} " in printed.out for name in COMMANDS)


def test_every_command_and_flag_has_help() -> None:
    for name in COMMANDS:
        command = load_command(name)
        for inner in getattr(command, "commands", {"": command}).values():
            assert inner.help, name
            assert all(option.help for option in inner.params if option.name != "help"), (name, inner.name)


def test_estimate_json_is_the_contract(cli: Cli) -> None:
    printed = cli(f"estimate --json --model opt-125m {HARDWARE} --strategy zero2 --micro-batch 4")
    assert printed.status == 0
    assert printed.err == ""
    answer = printed.json
    assert {group: set(CONTRACT[group]) - set(answer[group]) for group in CONTRACT} == {
        group: set() for group in CONTRACT
    }
    assert answer["schema_version"] == 1
    assert answer["verdict"] in ("fits", "tight")
    assert set(answer["provenance"].values()) <= {"measured", "calibrated", "datasheet"}
    memory = answer["memory"]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries")
    assert sum(memory[f"{part}_bytes"] for part in parts) == memory["peak_allocated_bytes"]


def test_the_plan_that_is_printed_can_be_read_back(cli: Cli) -> None:
    answer = cli(f"estimate --json --model opt-125m {HARDWARE}").json
    assert plan_from_dict(answer).configuration.strategy == "ddp"


def test_recommend_json_is_ranked_and_keeps_the_batch(cli: Cli) -> None:
    printed = cli(f"recommend --json --model opt-1.3b {HARDWARE} --global-batch 48 --top 3")
    assert printed.status == 0
    plans = printed.json["plans"]
    assert len(plans) == 3
    assert {plan["plan"]["global_batch_size"] for plan in plans} == {48}
    assert all(item["reason"] for item in printed.json["rejected"])
    assert plans[0]["runnable"]


def test_objective_memory_puts_the_smallest_first(cli: Cli) -> None:
    plans = cli(f"recommend --json --model opt-1.3b {HARDWARE} --objective memory --all-plans").json["plans"]
    used = [plan["memory"]["device_used_bytes"] for plan in plans]
    assert used == sorted(used)


def test_a_stage_of_a_pipeline_may_train_nothing(cli: Cli) -> None:
    """The head alone lies on the last one; the first keeps the weights that it does not train."""
    printed = cli(
        f"estimate --json --model llama-2-7b {HARDWARE} --strategy zero1 --pp 2 --micro-batch 1 --train-only lm_head"
    )
    assert printed.status == 0
    assert (printed.json["plan"]["pp"], printed.json["verdict"]) == (2, "fits")
    assert printed.json["memory"]["parameters_bytes"] > 0


def test_what_does_not_fit_ends_with_status_1(cli: Cli) -> None:
    printed = cli("estimate --model opt-6.7b --gpus 1 --gpu RTX-4090 --strategy single")
    assert printed.status == 1
    assert "does not fit" in printed.out


def test_nothing_fits_is_an_answer_with_remedies(cli: Cli) -> None:
    line = "recommend --model opt-125m --gpus 1 --gpu RTX-4090 --max-memory-gb 0.4"
    printed = cli(line)
    assert printed.status == 1
    assert "no plan fits" in printed.out
    assert "closest: " in printed.out
    assert "  1. " in printed.out
    answer = cli(f"{line} --json")
    assert answer.status == 1
    assert answer.json["plans"] == []
    assert answer.json["closest"]["verdict"] == "does_not_fit"
    assert answer.json["remedies"]


def test_recommend_names_what_it_assumed(cli: Cli) -> None:
    out = cli("recommend --model opt-125m --gpus 8").out
    assert "assumed" in out
    assert "--global-batch" in out
    assert "--seq-len" in out


def test_out_writes_plans_and_configs(cli: Cli, tmp_path: Path) -> None:
    printed = cli(f"recommend --model opt-1.3b {HARDWARE} --top 2 --out", tmp_path / "deep" / "plans")
    assert printed.status == 0
    written = tmp_path / "deep" / "plans"
    assert sorted(path.name for path in written.iterdir()) == ["plan-1", "plan-1.yaml", "plan-2", "plan-2.yaml"]
    assert load_plan(written / "plan-1.yaml").verdict in ("fits", "tight")
    assert list((written / "plan-1").glob("*/*"))


_MIXTRAL = "estimate --model mixtral-8x7b --gpus 16 --gpu H100-SXM5-80GB --strategy zero1 --backend native --ep 8"


def test_a_config_that_may_not_fit_in_its_trainer_says_by_how_much(cli: Cli, tmp_path: Path) -> None:
    """Megatron recomputes attention alone where the plan recomputes all but products: `check` of its script agrees."""
    stages = "--pp 2 --pp-schedule interleaved --virtual-stages 8 --micro-batch 1 --grad-accum 16"
    cli(f"{_MIXTRAL} {stages} --checkpointing selective --out", tmp_path / "plan.yaml")
    planned = load_plan(tmp_path / "plan.yaml").memory.device_needed_bytes
    printed = cli(f"emit '{tmp_path}/plan.yaml' --format megatron --out '{tmp_path}'")
    note = re.search(r"may not fit: the trainer's own modules and recomputation need up to (.*) per GPU.*", printed.err)
    assert printed.status == 0
    assert note is not None
    assert note[0].endswith(f"those of the plan {format_bytes(planned)}")
    assert note[0] in (tmp_path / "megatron.sh").read_text()
    answer = cli(f"check '{tmp_path}/megatron.sh' --gpus 16 --nodes 2 --gpu H100-SXM5-80GB --json").json
    (tight,) = [item for item in answer["findings"] if item["id"] == "tight"]
    assert f"needs up to {note[1]} per GPU" in tight["message"]


def test_a_config_that_does_not_fit_in_its_trainer_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli(f"{_MIXTRAL} --micro-batch 8 --grad-accum 1 --checkpointing full --out", tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml").verdict == "fits"
    printed = cli(f"emit '{tmp_path}/plan.yaml' --format megatron")
    assert (printed.status, printed.out) == (2, "")
    assert (
        "with the trainer's own modules cannot be written as megatron; plan again with --code megatron" in printed.err
    )
    assert cli(f"emit '{tmp_path}/plan.yaml' --format torchrun").status == 0


def test_explain_tells_why_the_others_lost(cli: Cli, tmp_path: Path) -> None:
    shown = cli(f"recommend --model opt-6.7b {HARDWARE} --top 1 --out", tmp_path)
    assert f"1 plan and its configs are in {tmp_path}" in f"{shown.out}{shown.err}".replace("\n", "")
    out = cli("explain", tmp_path / "plan-1.yaml").out
    assert "facebook/opt-6.7b" in out
    assert "chosen over" in out
    assert "single" in out
    assert cli("explain --json", tmp_path / "plan-1.yaml").json["plan"]["strategy"]


def test_models_and_devices(cli: Cli) -> None:
    for command, least in {"models": 295, "devices": 86, "devices --links": 53, "devices --nodes": 144}.items():
        names = [entry["name"] for entry in cli(f"{command} --json").json]
        assert len(names) == len(set(names)) >= least, command
    assert "gpt2-xl" in cli("models gpt2").out
    assert "H100-SXM5-80GB" in cli("devices h100").out
    assert cli("devices h100 --json").json[0]["source"]


def test_probe_answers_on_any_machine(cli: Cli) -> None:
    printed = cli("probe")
    assert printed.status == 0
    assert "memory" in printed.out
    assert cli("probe --json").json["host"]["logical_cores"]


def test_lengths_and_batches_take_suffixes(cli: Cli) -> None:
    line = "estimate --model llama3-8b --gpus 8 --gpu H100 --strategy fsdp --seq-len 8k --global-batch 1k --json"
    plan = cli(line).json["plan"]
    assert (plan["sequence_length"], plan["global_batch_size"]) == (8192, 1024)


def test_help_lists_flags_by_what_they_are_about(cli: Cli) -> None:
    out = cli("recommend --help").out
    panels = re.findall(r"^(\w[\w ]*):$", out, flags=re.MULTILINE)
    assert panels == ["Model", "Hardware", "Work", "Code", "Goal", "Output", "Options", "Examples"]
    goal = out[out.index("\nGoal:") : out.index("\nOutput:")]
    assert "--objective" in goal
    assert "--model " not in goal


def test_examples_of_help_are_command_lines_that_can_be_read(cli: Cli) -> None:
    for name, lines in EXAMPLES.items():
        out = " ".join(cli(f"{name} --help").out.replace("\\\n", "").split())
        for line in lines:
            assert line in out
            program, first, *words = line.partition(" | ")[0].split()
            assert program == "dsplan"
            assert first == (name.split() or [first])[0]
            with load_command(first).make_context(f"dsplan {first}", words):  # flags and numbers are read
                pass


@pytest.mark.parametrize("width", [80, 40])
def test_help_of_every_command_fits_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = ["", *COMMANDS, *(f"db {name}" for name in load_command("db").commands)]
    assert set(names) == set(EXAMPLES)
    for name in names:
        out = cli(f"{name} --help").out
        lines = out.splitlines()
        assert max(map(len, lines)) <= width, name
        assert "..." not in out.replace("[ARGS]...", "").replace("[ARGUMENTS]...", "").replace("NAME,...", "")
        sections = [line for line in lines if re.fullmatch(r"\w[\w ]*:", line)]
        flags = [line for line in lines if re.match(r" {2}--\w", line)]
        assert len(flags) <= 8 or len(sections) > 3, name  # Options, Output, Examples
    every = cli("--help").out
    assert "of a run that goes on what follows." in " ".join(every.split())  # what commands do, to the end


def test_an_estimate_is_written_for_viewers(cli: Cli, tmp_path: Path) -> None:
    trace, snapshot = tmp_path / "step.json", tmp_path / "memory.pickle"
    line = "estimate --model gpt2 --gpus 2 --gpu A100-SXM4-80GB --strategy fsdp"
    shown = cli(f"{line} --chrome-trace '{trace}' --memory-snapshot '{snapshot}'")
    assert f"pytorch.org/memory_viz, is in {snapshot}" in shown.out
    assert json.loads(trace.read_text())["traceEvents"]
    assert pickle.loads(snapshot.read_bytes())["device_traces"][0]
    refused = cli(f"{line} --chrome-trace '{tmp_path}'")
    assert (refused.status, refused.err.count("\n")) == (2, 1)


def test_a_plan_of_ones_own_is_written_for_other_commands(cli: Cli, tmp_path: Path) -> None:
    assert "`dsplan estimate` prices a plan of your own" in cli.refuses("recommend --model gpt2 --tp 2")
    file = tmp_path / "plan.yaml"
    shown = cli(f"estimate --model gpt2 --gpus 4 --gpu A100-SXM4-80GB --strategy fsdp --tp 2 --out '{file}'")
    assert shown.out.splitlines()[-1] == f"the plan is in {file}"
    assert "parallelism_config_tp_size: 2" in cli(f"emit '{file}' --format accelerate").out
    assert "fsdp (torch), dp 2 tp 2" in cli(f"explain '{file}'").out


def test_every_shell_is_shown_its_own_completion(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, begins in (
        ("bash", "_dsplan_completion() {"),
        ("zsh", "#compdef dsplan"),
        ("fish", "complete --command"),
    ):
        script = cli(f"--show-completion {shell}").out
        assert script.startswith(begins)
        assert f"_DSPLAN_COMPLETE=complete_{shell}" in script
        monkeypatch.setattr("shellingham.detect_shell", lambda shell=shell: (shell, f"/bin/{shell}"))
        assert cli("--show-completion").out == script
    assert "give one of bash, zsh, fish" in cli.refuses("--show-completion csh")


def test_a_shell_completes_flags_and_names(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DSPLAN_COMPLETE", "complete_bash")
    for words, expected in (
        ("dsplan reco", "recommend"),
        ("dsplan recommend --objective m", "memory"),
        ("dsplan recommend --model llama3-7", "llama3-70b"),
        ("dsplan estimate --gpu h100-s", "h100-sxm5-80gb"),
        ("dsplan run --strategy fsdp-", "fsdp-grad-op"),
        ("dsplan emit plan.yaml --format acc", "accelerate"),
        ("dsplan track runs --to wandb,ml", "wandb,mlflow"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert expected in cli("").out.split()


def test_the_command_prints_a_row_for_each_way_and_ends_by_what_fits(cli: Cli) -> None:
    line = "max --model opt-1.3b --gpus 8 --gpu A100-SXM4-80GB"
    shown = cli(line)
    assert shown.status == 0
    assert "micro-batch  sequence  model" in shown.out
    answer = cli(f"{line} --strategy zero3 --json").json
    assert {row["strategy"] for row in answer["maxima"]} == {"zero3"}
    assert all(row["micro_batch_size"] > 0 and row["model_parameters"] > 10**9 for row in answer["maxima"])
    assert not any("--global-batch" in text for text in answer["defaults"])
    assert cli("max --model llama3.1-405b --gpus 1 --gpu RTX-3070").status == 1
    for wrong, words in (
        (f"{line} --global-batch 8", "leave it out"),
        (f"{line} --strategy hsdp", "--strategy hsdp: is fsdp unless"),
        (f"{line} --tp 3", "does not divide 8 GPUs"),
        (f"{line} --strategy ddp --offload optimizer", "offload optimizer is not possible with ddp"),
    ):
        assert words in cli.refuses(wrong)


def test_runs_without_a_plan_can_be_listed(cli: Cli) -> None:
    assert cli("db list --strategy unplanned").status == 0
    assert "nearest: unplanned" in cli.refuses("db list --strategy unplaned")
