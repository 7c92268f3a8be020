"""Numbers, files, streams and interrupts that no machine should meet: one line and a status, never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dsplan.cli.app import COMMANDS, load_command
from hardware_db.errors import BrokenFile
from hardware_db.handed_in import MOST_BYTES, read_json, read_yaml
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import DsplanError
from planner.models.from_hf.config import facts_from_config
from planner.search.request import WorkOptions, make_request
from tests.dsplan.cli import Cli

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "opt-125m", "--gpu", "A100-SXM4-80GB")
NO_NUMBERS = ("", " ", "nan", "inf", "-1", "1e308", "1e-300", "٣", "1_0", "0x10", "9" * 5000, "-0x", "²")
MPT = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 9}
BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def numeric_flags() -> list[tuple[str, str]]:
    """Every flag of every command that takes a number."""
    return [
        (name, max(parameter.opts, key=len))
        for name in COMMANDS
        for parameter in load_command(name).params
        if parameter.type.name.split()[0] in ("int", "integer", "float")
    ]


def test_every_number_of_the_command_line_has_both_limits() -> None:
    for name in COMMANDS:
        for parameter in load_command(name).params:
            if parameter.type.name.split()[0] in ("int", "integer", "float"):
                assert parameter.type.min is not None, (name, parameter.name)
                assert parameter.type.max is not None, (name, parameter.name)


@pytest.mark.parametrize(("command", "flag"), numeric_flags())
@pytest.mark.sweep(every=6)
def test_a_flag_takes_plain_numbers_only(cli: Cli, command: str, flag: str) -> None:
    """Values that its type takes, and one of the others, another for each flag, are given to the whole command."""
    (parameter,) = (parameter for parameter in load_command(command).params if flag in parameter.opts)
    whole = [NO_NUMBERS[sum(map(ord, flag)) % len(NO_NUMBERS)]]
    for given in NO_NUMBERS:
        try:
            parameter.type.convert(given, parameter, None)
        except typer.BadParameter:
            continue
        whole.append(given)
    for given in whole:
        assert flag in cli.refuses(command, flag, given)


@pytest.mark.parametrize(
    "line",
    [
        "recommend --out",
        "recommend --cluster",
        "emit plan.yaml --format torchrun --out",
        "emit --format torchrun",
        "explain",
        "run --plan",
        "run --run-dir",
        "run --resume",
        "run --hostfile",
        "run --checkpoint-dir",
        "run",
        "bench --generate",
        "bench --plan",
        "doctor --directory",
        "db export",
        "db import",
    ],
)
def test_a_path_that_is_empty_or_cannot_be_looked_up(cli: Cli, line: str) -> None:
    for path, words in (("", "is empty"), ("a\0b", "NUL"), ("a" * 5000, "File name too long")):
        message = cli.refuses(line, path)
        assert words in message
        assert len(message) < 300


def test_a_directory_for_a_file_and_a_file_for_a_directory(cli: Cli, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    assert "Is a directory" in cli.refuses("explain", tmp_path)
    assert "Is a directory" in cli.refuses("recommend --model opt-125m --cluster", tmp_path)
    assert str(file) in cli.refuses("recommend --model opt-125m --gpus 1 --gpu A100-SXM4-80GB --out", file)
    assert "not a regular file" in cli.refuses("bench --gpu A100-SXM4-80GB --only matmul --generate", tmp_path)


@pytest.mark.parametrize("text", ["\udcff", "a\0b"])
def test_a_name_is_text(cli: Cli, text: str) -> None:
    assert "is no text" in cli.refuses("db list --model", text)
    assert "is no text" in cli.refuses("db show", text)


@pytest.mark.parametrize("gigabytes", [0, -1, 1e308, 1e-300, float("nan"), float("inf")])
def test_memory_limits_as_keywords(gigabytes: float) -> None:
    cluster = resolve_cluster(HardwareRequest(gpu="A100-SXM4-80GB"))
    facts = facts_from_config(LLAMA, "llama")
    for option in ("max_memory_gb", "host_memory_gb"):
        with pytest.raises(DsplanError, match=r"give a number from 0\.001 to 1,000,000"):
            make_request(facts, cluster, WorkOptions(**{option: gigabytes}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu: A100-80\nnodes: 1\nnodes: 2", "has the key 'nodes' twice at line 3"),
        ('{"nodes": 1, "nodes": 2}', "has the key 'nodes' twice"),
        ("usd_per_gpu_hour: .inf", "holds inf, no finite number"),
        ("nodes: .nan", "holds nan, no finite number"),
        ('{"nodes": 1e400}', "holds inf, no finite number"),
        ('{"nodes": NaN}', "holds nan, no finite number"),
        ("nodes: " + "9" * 5000, "write decimal digits"),
        ('{"nodes": ' + "9" * 5000 + "}", "out of range"),
        ("nodes: 010", "has the number '010'; write decimal digits"),
        ("nodes: 1:30", "has the number '1:30'; write decimal digits"),
        ("[" * 300 + "]" * 300, "nested more than 100 deep"),
        ("- " * 5000, "nested more than 100 deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested more than 100 deep"),
        ("a: &a [*a]", "nested more than 100 deep"),
        (BOMB, "holds more than 2,000,000 values"),
        ("a: &a {b: 1}\nc:\n  <<: *a", "merges mappings with <<"),
        ("a: !!set {b}", "no finite number, text, list or mapping"),
        ("a: !!bool maybe", "a tag does not fit its value"),
        ("a: !!python/object:os.system true", "is not YAML at line 1"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ("a" * (MOST_BYTES + 1), "is larger than 4 MiB"),
    ],
    ids=range(21),
)
@pytest.mark.sweep(every=2)
def test_files_that_people_hand_in(tmp_path: Path, text: str, words: str) -> None:
    (path := tmp_path / "file.yaml").write_text(text)
    with pytest.raises(BrokenFile) as caught:
        read_yaml(path, "mend it")
    assert words in str(caught.value)
    assert str(caught.value).endswith("; mend it")


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", "a" * 5000, "."])
def test_what_is_no_file_is_one_line(path: str) -> None:
    for read in (read_json, read_yaml):
        with pytest.raises(BrokenFile) as caught:
            read(path, "mend it")
        assert "\0" not in str(caught.value)
        assert len(str(caught.value)) < 300


def test_dates_and_the_small_numbers_of_json_are_what_they_look_like(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_text("day: 2026-99-99")
    assert read_yaml(path, "") == {"day": "2026-99-99"}
    path.write_text('{"seconds": 1e-05}')
    assert read_yaml(path, "") == {"seconds": 1e-05}


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("usd_per_gpu_hour", 1e308),
        ("usd_per_gpu_hour", 1e-300),
        ("capacity_gb", -1),
        ("capacity_gb", 1e300),
        ("host_memory_gb", 10**30),
        ("nvme_gb", True),
        ("nodes", 10**12),
        ("gpus_per_node", 1.5),
        ("nics_per_node", 10**9),
        ("host_cores", 0),
        ("intra_link", ""),
    ],
)
def test_figures_of_a_cluster_file(cli: Cli, tmp_path: Path, key: str, given: object) -> None:
    (path := tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"gpu": "A100-SXM4-80GB", key: given}))
    assert f"{path}: {key} is " in cli.refuses("recommend --json --model opt-125m --cluster", path)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A good plan, as the file has it."""
    from dsplan.__main__ import main

    directory = tmp_path_factory.mktemp("plans")
    os.environ["DSPLAN_HOME"], before = str(directory / "home"), os.environ.get("DSPLAN_HOME")
    try:
        assert main(["recommend", *MODEL, "--gpus", "2", "--top", "1", "--out", str(directory)]) == 0
    finally:
        if before is None:
            del os.environ["DSPLAN_HOME"]
        else:
            os.environ["DSPLAN_HOME"] = before
    document: dict[str, Any] = yaml.safe_load((directory / "plan-1.yaml").read_text())
    return document


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        (("memory", "phases", "forward"), "1e400"),
        (("memory", "phases", "forward"), "much"),
        (("memory", "states"), 5),
        (("memory", "peak_phase"), 5),
        (("memory", "parameters_bytes"), -1),
        (("memory", "parameters_bytes"), 1.5),
        (("memory", "parameters_bytes"), 10**30),
        (("time", "step_seconds"), "1e400"),
        (("time", "step_seconds"), -1.0),
        (("time", "step_seconds"), 1e300),
        (("throughput", "mfu"), "half"),
        (("cluster", "capacity_bytes"), -1),
        (("cluster", "capacity_bytes"), "much"),
        (("cluster", "capacity_bytes"), None),
        (("cluster", "gpus"), 0),
        (("cluster", "nodes"), "1"),
        (("model", "parameters"), "many"),
        (("model", "facts"), {"num_layers": 10**12}),
        (("workload", "max_memory_bytes"), -1),
        (("plan", "micro_batch_size"), 10**12),
        (("verdict",), "perhaps"),
        (("runnable",), "no"),
        (("limited_by",), 7),
        (("notes",), "text"),
        (("alternatives",), [1]),
        (("alternatives",), [{"strategy": "ddp"}]),
    ],
)
@pytest.mark.sweep(every=2)
def test_figures_of_a_plan(
    cli: Cli, tmp_path: Path, plan: dict[str, Any], keys: tuple[str, ...], given: object
) -> None:
    document = json.loads(json.dumps(plan))
    holder = document
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = given
    (path := tmp_path / "plan.yaml").write_text(yaml.safe_dump(document))
    for command in ("explain", "emit --format torchrun"):
        assert keys[0] in cli.refuses(command, path)


def test_a_gpu_that_others_have_filled_is_explained(cli: Cli, tmp_path: Path, plan: dict[str, Any]) -> None:
    document = {**plan, "cluster": {**plan["cluster"], "capacity_bytes": 0}}
    (path := tmp_path / "plan.yaml").write_text(json.dumps(document))
    assert cli("explain", path).status == 0


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", None),
        ("hidden_size", 10**12),
        ("hidden_size", None),
        ("num_attention_heads", 10**12),
        ("num_key_value_heads", 10**12),
        ("vocab_size", 10**12),
        ("intermediate_size", 10**12),
        ("attention_dropout", 1e300),
    ],
)
def test_figures_of_a_config(key: str, given: object) -> None:
    with pytest.raises(BrokenFile, match=f"field '{key}' is "):
        facts_from_config({**LLAMA, key: given}, "config.json")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**MPT, "attn_config": 5}, "attn_config"),
        ({**LLAMA, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 2}, "a part of another model"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": "two"}, "num_labels"),
        ({**LLAMA, "model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary"),
        ({**LLAMA, "model_type": "qwen3_moe", "num_experts": 10**12}, "num_experts"),
    ],
    ids=["mpt", "tower", "labels", "rotary", "experts"],
)
def test_keys_that_one_architecture_reads(config: dict[str, Any], words: str) -> None:
    with pytest.raises(DsplanError) as caught:
        facts_from_config(config, "config.json")
    assert words in str(caught.value)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line.replace("dsplan", f"{shlex.quote(sys.executable)} -m dsplan")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("dsplan models >&-", 2, "dsplan: the standard output is closed; redirect it"),
        ("dsplan models > /dev/full", 2, "dsplan: the standard output cannot be written (No space left on device)"),
        ("dsplan models >&- 2>&- <&-", 2, ""),
        ("dsplan models 2>&- <&- | tail -n 1 > /dev/null", 0, ""),
        ("dsplan models --bogus 2> /dev/full", 2, ""),
        ("dsplan models --json | head -n 1 > /dev/null; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_streams_that_are_closed_or_full(line: str, status: int, message: str) -> None:
    finished = shell(line)
    assert finished.returncode == status, finished.stderr
    assert finished.stderr.startswith(message)
    assert finished.stderr.count("\n") == (1 if message else 0)


INTERRUPTING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv[:1] = []
from dsplan.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["dsplan.cli.app", "typer", "hardware_db.errors", "planner.search.search"])
def test_an_interrupt_while_modules_are_imported(module: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", INTERRUPTING, module, "recommend", *MODEL],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "")


def test_nothing_slow_is_imported_before_an_interrupt_is_awaited() -> None:
    code = "import sys; before = set(sys.modules); import dsplan.__main__; print(*sorted(set(sys.modules) - before))"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert set(finished.stdout.split()) - {"__future__"} == {"dsplan", "dsplan.__main__"}
