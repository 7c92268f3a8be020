"""`dsplan mcp`: the command line's answers for assistants, asked through the SDK's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsplan.ui.tools import TOOLS, ask, command_words
from hardware_db.errors import DsplanError

LLAMA: dict[str, Any] = {"model": "llama-3-8b", "gpus": 8, "gpu": "h100"}
AXOLOTL = """\
base_model: meta-llama/Meta-Llama-3-8B
datasets: [{path: x, type: alpaca}]
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
deepspeed: zero3.json
bf16: true
"""


def command_line(*words: str, folder: Path) -> Any:
    process = subprocess.run([sys.executable, "-m", "dsplan", *words], capture_output=True, text=True, cwd=folder)
    assert process.returncode in (0, 1), process.stderr
    return json.loads(process.stdout)


def test_a_real_client_is_answered_over_standard_input(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    import anyio
    from mcp import Client, StdioServerParameters

    async def talk() -> tuple[Any, Any, Any, Any]:
        words = ["-m", "dsplan", "mcp", "--seconds", "120"]
        server = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
        async with Client(server) as client:
            listed = await client.list_tools()
            plan = await client.call_tool("estimate", {**LLAMA, "strategy": "zero3", "micro_batch": 2})
            checked = await client.call_tool("check", {"files": {"a.yaml": AXOLOTL}, "gpus": 8, "gpu": "h100"})
            wrong = await client.call_tool("estimate", {**LLAMA, "micro_batch": 0})
            return listed, plan, checked, wrong

    listed, plan, checked, wrong = anyio.run(talk)
    assert [tool.name for tool in listed.tools] == ["recommend", "estimate", "max", "check", "explain"]
    assert all(tool.annotations.read_only_hint for tool in listed.tools)
    words = ("--model=llama-3-8b", "--gpus=8", "--gpu=h100", "--strategy=zero3", "--micro-batch=2")
    assert plan.structured_content == command_line("estimate", "--json", *words, folder=tmp_path)
    assert not plan.is_error
    assert checked.structured_content["format"] == "axolotl"
    assert wrong.is_error
    assert "\n" not in wrong.content[0].text


def test_arguments_are_the_flags_of_the_command_line(tmp_path: Path) -> None:
    words = command_words(
        "recommend", {**LLAMA, "seq_len": 8192, "compile": True, "price": 2.5, "nodes": None}, tmp_path
    )
    assert words == [
        *("recommend", "--json", "--model=llama-3-8b", "--gpus=8", "--gpu=h100"),
        *("--seq-len=8192", "--compile", "--price=2.5"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("recommend", {"model": "os:system"}, "unknown model"),
        ("recommend", {"model": "/etc/passwd"}, "unknown model"),
        ("recommend", {**LLAMA, "out": "/tmp/x"}, "no argument 'out'"),
        ("recommend", {**LLAMA, "cluster": "/etc/passwd"}, "no argument 'cluster'"),
        ("estimate", {**LLAMA, "exact": True}, "no argument 'exact'"),
        ("estimate", {**LLAMA, "gpus": 10**12}, "gpus"),
        ("estimate", {**LLAMA, "gpus": [8]}, "give a number"),
        ("estimate", {**LLAMA, "precision": "bf17"}, "give one of fp32"),
        ("estimate", {**LLAMA, "compile": "yes"}, "give true or false"),
        ("estimate", {**LLAMA, "lora_targets": "x" * 200}, "at most 100"),
        ("estimate", {"config": "x" * 2**20}, "larger than 128 KiB"),
        ("estimate", {"config": "{}", "model": "gpt2"}, "give one of them"),
        ("check", {}, "files is missing"),
        ("check", {"files": {"../x.yaml": "a: 1"}}, "no name of a file"),
        ("check", {"files": {"x.yaml": ""}}, "is missing"),
        ("check", {"files": {f"{count}.yaml": "a: 1" for count in range(9)}}, "at most 8"),
        ("check", {"files": {"x.yaml": "a: 1"}, "command": "rm -rf /"}, "word by word"),
        ("explain", {"plan": 3}, "is missing"),
        ("emit", {}, "there is no tool 'emit'"),
    ],
)
def test_what_strangers_may_not_ask_is_refused_in_one_line(
    name: str, arguments: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(DsplanError) as caught:
        command_words(name, arguments, tmp_path)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_answer_is_given_up_in_time() -> None:
    assert "within 0.01 seconds" in ask("recommend", LLAMA, seconds=0.01).error


def test_every_schema_is_bounded() -> None:
    for tool in TOOLS.values():
        assert tool.schema["additionalProperties"] is False
        for name, part in tool.schema["properties"].items():
            bounds = {"enum", "maximum", "maxLength", "maxItems", "maxProperties"} & part.keys()
            assert bounds or part["type"] == "boolean", name


def test_a_command_is_a_script_beside_the_files_whatever_they_are_called(tmp_path: Path) -> None:
    files = dict.fromkeys(("command.sh", "the-command.sh", "command-0.sh", "x.yaml"), "a: 1")
    words = command_words("check", {"files": files, "command": ["torchrun", "x.py"]}, tmp_path)
    assert (tmp_path / words[-1]).read_text() == "torchrun x.py"
    assert {path.name for path in tmp_path.iterdir()} == {*files, Path(words[-1]).name}


def test_other_commands_do_not_import_the_sdk() -> None:
    code = (
        "import sys; from dsplan.cli.app import COMMANDS, load_command;"
        "[load_command(name) for name in COMMANDS];"
        "sys.exit(any(name.partition('.')[0] in ('mcp', 'anyio', 'pydantic') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
