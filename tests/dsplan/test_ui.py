"""The page's question as an address, who answers it, and what of the server strangers reach."""

from __future__ import annotations

import base64
import json
import os
import re
import runpy
import socket
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psutil
import pytest

from dsplan.cli.flags import HardwareFlags, ModelFlags, RankingFlags, WorkFlags
from dsplan.ui import address, answers, gate, pieces
from dsplan.ui.address import page_fields, read_address, read_values
from dsplan.ui.answers import Task
from dsplan.ui.workers import Remembered, Unanswered, Workers
from hardware_db.errors import DsplanError
from tests.dsplan.cli import Cli

ROOT = Path(__file__).parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": 32000, "_name_or_path": "us/own",
}  # fmt: skip


# The question as an address.


def test_the_page_has_every_flag_that_names_no_file_of_the_server() -> None:
    flags = {item.name for group in (ModelFlags, HardwareFlags, WorkFlags, RankingFlags) for item in fields(group)}
    assert flags - set(page_fields()) == {"model_size", "cluster", "out", "top", "pareto", "plot"}


TEXTS = {"switch": "true", "whole": "3", "fraction": "1.5", "text": "it's <b>&=+%2B é"}


@pytest.mark.parametrize("name", page_fields())
def test_what_is_asked_comes_back_from_the_address(name: str) -> None:
    field = page_fields()[name]
    text = TEXTS.get(field.kind) or next(choice for choice in field.choices if choice != field.default)
    text = "0.5" if field.kind == "fraction" and 0 < field.most < 1.5 else text
    question = read_values({"model": "opt-6.7b", "gpu": "H100", name: text})
    assert question.values[name] != page_fields()[name].default
    assert read_address(question.address()) == (question, ())


def test_an_own_model_is_in_the_address() -> None:
    question = read_values({"gpu": "H100", "gpus": "4"}, json.dumps(LLAMA))
    back, _ = read_address(question.address())
    assert back == question
    assert len(question.address()) < 400
    assert back.question()[1].name == "us/own"
    assert back.question()[1].num_layers == 8


def test_an_empty_address_asks_something_that_has_an_answer() -> None:
    question, unknown = read_address("")
    assert not unknown
    assert answers.answer(Task(kind="plans", query=question.address()))["plans"]


def test_what_goes_without_saying_is_not_added_to_other_hardware() -> None:
    question, unknown = read_address("node-type=dgx-h100&nodes=2&__theme=dark&colour=red")
    assert (question.values["gpu"], question.values["gpus"], question.values["model"]) == (None, None, "llama-3-8b")
    assert unknown == ("'colour'",)


def test_the_command_line_asks_the_same() -> None:
    question, _ = read_address("model=opt-6.7b&gpus=4&gpu=A100&seq-len=1k&fastest=true")
    assert question.command() == "dsplan recommend --model opt-6.7b --gpus 4 --gpu A100 --seq-len 1024 --fastest"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("model=/etc/passwd", "unknown model '/etc/passwd'; choose one of the list"),
        ("model=.", "unknown model '.'"),
        ("model=pyproject.toml", "unknown model 'pyproject.toml'"),
        ("model=config.json", "unknown model 'config.json'"),
        ("model=os:getcwd", "unknown model 'os:getcwd'"),
        ("model=" + quote("<script>alert(1)</script>"), "unknown model '<script>alert(1)</script>'"),
        ("model=" + quote("\x1b[31mred"), r"model is '\x1b[31mred'; write it in letters that can be seen"),
        ("model=" + "a" * 15_000, "write at most 100 characters"),
        ("model=" + "a" * 2**20, "the address is longer than 16,384 letters"),
        ("model=7B&gpus=0", "gpus is 0; give a whole number from 1 to 1,000,000"),
        ("model=7B&gpus=1e3", "gpus is '1e3'"),
        ("model=7B&gpus=2.5", "gpus is '2.5'"),
        ("model=7B&gpus=٣", "gpus is '٣'"),
        ("model=7B&seq-len=9999M", "give a whole number from 1 to 100,000,000"),
        ("model=7B&price=nan", "price is 'nan'"),
        ("model=7B&code=/etc/passwd", "code is '/etc/passwd'; give one of transformers"),
        ("model=7B&method=magic", "method is 'magic'; give one of full, lora, qlora, dora"),
        ("model=7B&gpu=cpu", "unknown GPU 'cpu'"),
        ("model=7B&nodes=2", "no hardware is named"),
        ("model=7B&config=AAAA", "no config.json as this page packs it"),
        ("&".join(f"a{number}=1" for number in range(200)), "more than 100 things"),
    ],
    ids=lambda value: value[:30],
)
def test_what_cannot_be_asked_is_refused_in_one_line(query: str, words: str) -> None:
    error = answers.answer(Task(kind="plans", query=query))["error"]
    assert words in error
    assert "\n" not in error
    assert len(error) < 400


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("model=llama-3-8b&gpus=8&gpu=H100&shard=3", "“Ranks that share one set of states” 3 does not divide 8 GPUs"),
        ("model=llama-3-8b&gpus=8&gpu=H100&lora-rank=4", "“LoRA rank” is for “Method” lora"),
        ("model=7B&gpus=1e3&gpu=H100", "“GPUs in total” is &#x27;1e3&#x27;; give a whole number"),
    ],
)
def test_the_page_names_its_fields_where_the_command_line_names_flags(query: str, words: str) -> None:
    error = answers.answer(Task(kind="plans", query=query))["error"]
    shown = pieces.failure_html(error)
    assert "--" in error
    assert words in shown
    assert "--" not in shown


CALLED_AS_THEIR_FLAG = {
    *("model", "nodes", "node_type", "task", "precision", "optimizer", "attention", "method", "objective", "deadline"),
    *("offload", "image_size", "lora_rank", "lora_targets", "fp8_recipe", "gpu", "expert_imbalance", "global_batch"),
}
"""Fields whose flag is what torch, PEFT and Megatron call them."""


def test_fields_are_called_by_terms_of_the_field_and_not_by_their_flags() -> None:
    fields = address.page_fields()
    spelt = {name for name, field in fields.items() if field.label.lower() == field.flag.replace("-", " ")}
    assert spelt <= CALLED_AS_THEIR_FLAG
    labels = [field.label for field in fields.values()]
    assert len(set(labels)) == len(labels)
    assert not [label for label in labels if re.search(r"\b(len|num|tp|ref|gpus|kl|ema)\b", label)]


def test_answers_name_fields_and_leave_commands_and_other_flags_alone() -> None:
    answer = answers.answer(Task(kind="plans", query="model=llama-2-70b&gpus=1&gpu=RTX-3060-12GB"))
    assert "(“Precision”)" in answer["html"]
    assert "(“GPUs in total” " in answer["html"]
    assert not re.search("--[a-z]", answer["html"])
    assert "--gpus 1" in answer["command"]
    kept = '<b style="--price:1">--micro-batch 2</b><code>--gpus 8</code><pre class="x">\n--gpus 8</pre>'
    assert address.with_labels(kept) == kept


def test_a_packed_config_that_grows_without_end_is_refused() -> None:
    packed = base64.urlsafe_b64encode(zlib.compress(b" " * 10**7, 9)).decode()
    assert len(packed) < address.MOST_ADDRESS_BYTES
    with pytest.raises(DsplanError, match="as this page packs it"):
        read_address(urlencode({"config": packed}))


@pytest.mark.parametrize("name", ["$(reboot)", "a\nb", "x" * 101, "../../etc", "a b", 7, "a/b/c"])
def test_a_config_names_its_model_only_in_letters_that_no_shell_reads(name: object) -> None:
    question = read_values({"gpu": "H100"}, json.dumps({**LLAMA, "_name_or_path": name}))
    facts = question.question()[1]
    assert facts.name == ("7" if name == 7 else "config.json")


def test_no_file_and_no_other_machine_is_asked_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a stranger's name reached the file system")

    with pytest.raises(DsplanError):  # the catalogues are read once
        read_values({"model": "no-such-model", "gpu": "H100"}).question()
    for name in ("open", "stat"):
        monkeypatch.setattr(f"os.{name}", refused)
    monkeypatch.setattr("builtins.open", refused)
    for model in ("/etc/passwd", "~/config.json", "./config.json", "json:loads", "https://example.com/config.json"):
        with pytest.raises(DsplanError, match="unknown model"):
            read_values({"model": model, "gpu": "H100"}).question()


# A trainer's own files on the page.

CHECKED = "model=opt-125m&gpus=2&gpu=A100-SXM4-80GB&objective=cost&price=2"
AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: tatsu-lab/alpaca}]
sequence_len: 2048
micro_batch_size: 32
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
bf16: true
deepspeed: ds.json
"""


def checked(files: object, query: str = CHECKED) -> Any:
    return answers.answer(Task(kind="check", query=query, files=json.dumps(files)))


def test_files_of_a_trainer_are_checked_and_fill_the_question() -> None:
    answer = checked({"train.yaml": AXOLOTL, "ds.json": '{"zero_optimization": {"stage": 1}}'})
    assert "<h2>train.yaml, ds.json: does not fit</h2>" in answer["html"]
    assert "+micro_batch_size: " in answer["html"]
    fields = {name: text for name, text in answer["fields"].items() if text}
    assert fields.items() >= {"model": "meta-llama/Llama-3.1-8B", "gpus": "2", "gpu": "A100-SXM4-80GB"}.items()
    assert fields.items() >= {"seq_len": "2048", "global_batch": "128", "precision": "bf16"}.items()
    assert not {"objective", "price"} & answer["fields"].keys()
    question = read_values(answer["fields"], answer["config"])
    assert question.question()[0].global_batch == 128


def test_a_script_brings_its_gpus_and_the_page_what_no_file_says() -> None:
    script = "accelerate launch --num_processes 4 sft.py --model_name_or_path gpt2 --dataset_name x"
    assert checked({"run.sh": script})["fields"]["gpus"] == "4"
    deepspeed = {"ds.json": '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}'}
    assert checked(deepspeed)["fields"]["model"] == "facebook/opt-125m"
    own = read_values({"gpu": "H100", "gpus": "8"}, json.dumps(LLAMA)).address()
    assert json.loads(checked(deepspeed, own)["config"]) == LLAMA


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ([], "no texts by name"),
        ({"a.yaml": 1}, "no texts by name"),
        ({}, "nothing to read"),
        ({f"{count}.yaml": "a: 1" for count in range(9)}, "9 files are there; choose at most 8"),
        ({"a.yaml": "é" * 2**20}, "larger than 1 MiB"),
        ({"a.yaml": "a: \ufffd"}, "not text in UTF-8"),
        ({"a.yaml": "a: \0"}, "holds NUL characters"),
        ({"a.yaml": "a: !!python/object/apply:os.system [reboot]"}, "which nothing here carries out"),
        ({"<b>.yaml": "a: [1"}, "is not YAML"),
        ({"a\n.sh": "rm -rf /"}, "starts no training"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_that_cannot_be_read_are_one_line(files: object, line: str) -> None:
    error = checked(files)["error"]
    assert line in error
    assert "\n" not in error


def test_no_file_of_the_server_is_read_for_what_a_trainers_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.yaml").write_text(AXOLOTL)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(LLAMA))
    for name in ("secret.yaml", str(tmp_path / "secret.yaml")):
        assert "hand it in" in checked({"run.sh": f"axolotl train {name}"})["error"]
        manifest = {"run": f"axolotl train {name}", "resources": {"accelerators": "A100:8"}}
        assert "hand it in" in checked({"sky.yaml": json.dumps(manifest)})["error"]
    assert "unknown model" in checked({"train.yaml": AXOLOTL.replace("meta-llama/Llama-3.1-8B", "own")})["html"]


# Who answers.


def test_a_process_that_hangs_or_dies_is_replaced() -> None:
    task = Task(kind="plans", query="model=opt-125m&gpus=1&gpu=H100-SXM5-80GB")
    with Workers(1, seconds=1) as workers:
        worker(psutil.Process()).suspend()
        with pytest.raises(Unanswered, match="no answer within 1 seconds"):
            workers.ask(task)
        workers.seconds = 120
        assert "error" not in workers.ask(task)
        worker(psutil.Process()).kill()
        with pytest.raises(Unanswered, match="could not be answered"):
            workers.ask(task)
        assert "error" not in workers.ask(task)
    assert not [child for child in psutil.Process().children() if "dsplan.ui.answers" in child.cmdline()]


def worker(process: psutil.Process) -> psutil.Process:
    while True:  # a process that has just been forked still has its parent's command line
        for child in process.children():
            with suppress(psutil.NoSuchProcess):
                if "dsplan.ui.answers" in child.cmdline():
                    return child
        time.sleep(0.01)


class Counted:
    """Answers that say how often they were made, and wait for each other to be asked."""

    def __init__(self) -> None:
        self.made: list[Task] = []

    def ask(self, task: Task) -> dict[str, Any]:
        self.made.append(task)
        time.sleep(0.05)
        if task.query == "fails":
            raise Unanswered("not now")
        return {"text": task.query * 100}


def test_one_answer_serves_all_who_ask_the_same_at_once() -> None:
    counted = Counted()
    remembered = Remembered(counted)
    received: list[Any] = []
    threads = [
        threading.Thread(target=lambda: received.append(remembered.ask(Task(kind="plans", query="q"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(received) == 8
    assert len(counted.made) == 1


def test_what_could_not_be_answered_is_asked_again() -> None:
    counted = Counted()
    remembered = Remembered(counted)
    for _ in range(2):
        with pytest.raises(Unanswered):
            remembered.ask(Task(kind="plans", query="fails"))
    assert len(counted.made) == 2


def test_only_so_much_is_remembered_and_the_latest_longest() -> None:
    counted = Counted()
    remembered = Remembered(counted, most_bytes=350)
    for query in "abca":
        remembered.ask(Task(kind="plans", query=query))
    assert [task.query for task in counted.made] == ["a", "b", "c"]
    remembered.ask(Task(kind="plans", query="d"))
    remembered.ask(Task(kind="plans", query="a"))
    remembered.ask(Task(kind="plans", query="b"))
    assert [task.query for task in counted.made] == ["a", "b", "c", "d", "b"]


# Where it is served.


@pytest.mark.slow
def test_it_is_served_on_this_machine_alone_unless_asked(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def served(self: Any, sockets: list[socket.socket]) -> None:
        addresses.append(sockets[0].getsockname()[0])

    addresses: list[str] = []
    uvicorn = pytest.importorskip("uvicorn", reason="needs gradio (extra ui)")
    monkeypatch.setattr(uvicorn.Server, "run", served)
    monkeypatch.setitem(os.environ, "GRADIO_ANALYTICS_ENABLED", "False")
    assert cli("ui", "--workers", "1").status == 0
    runpy.run_path(str(ROOT / "scripts" / "examples" / "space_app.py"), run_name="__main__")
    assert addresses == ["127.0.0.1", "0.0.0.0"]


# What of the server strangers reach.


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/upload", "/gradio_api/proxy=http://a",
        "/gradio_api/component_server", "/gradio_api/stream/x", "/gradio_api/deep_link", "/monitoring", "/docs",
        "/gradio_api/custom_component/x/client/y/z", "/gradio_api/vibe-edit", "/gradio_api/process_recording",
        "/gradio_api/run/changed", "/gradio_api/call/changed", "/login", "/x\n/",
    ],
)  # fmt: skip
def test_what_the_page_does_not_need_is_not_there(path: str) -> None:
    assert asked_of_gate({"path": path}) == 404


def test_a_request_that_is_too_large_does_not_get_through() -> None:
    length = str(gate.MOST_BODY_BYTES + 1).encode()
    assert asked_of_gate({"path": "/gradio_api/queue/join", "headers": [(b"content-length", length)]}) == 413
    assert asked_of_gate({"path": "/gradio_api/queue/join", "headers": [(b"content-length", b"-1")]}) == 413
    assert asked_of_gate({"path": "/gradio_api/queue/join"}, parts=20) == "disconnected"
    assert asked_of_gate({"path": "/gradio_api/queue/join"}, parts=3) == 200


def asked_of_gate(scope: dict[str, Any], parts: int = 1) -> Any:
    """The status of an answer, or that the application behind the gate saw the other side go."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                sent.append("disconnected")
                return
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})

    left = [{"type": "http.request", "body": b"x" * 2**18, "more_body": part < parts - 1} for part in range(parts)]

    async def receive() -> Any:
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["status"] if message["type"] == "http.response.start" else message)

    # Nothing in it waits, and tests in a browser have an event loop of their own in this thread.
    with pytest.raises(StopIteration):
        gate.Gate(application)({"type": "http", "headers": [], **scope}, receive, send).send(None)
    return sent[0]
