"""Names that a terminal would obey, and endless ones, are text in every command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsplan.cli.app import COMMANDS, load_command
from dsplan.ui.server import ServerOptions, _open_listener
from hardware_db.errors import DsplanError
from hardware_db.notices import LABEL, label_lines
from tests.dsplan.cli import Cli

HOSTILE = "<script>alert(1)</script>\x1b[31m\x1b]0;owned\x07\x9b31m\u202eeman\nnew"
LONG = "y" * 100_000
MOST_PRINTED = 20_000
QUESTION = {"--model": "opt-125m", "--gpu": "A100-SXM4-80GB"}
GIVEN: dict[str, dict[str, str]] = {
    "estimate": QUESTION,
    "recommend": QUESTION,
    "max": QUESTION,
    "report": {**QUESTION, "--out": "page.html"},
    "emit": {"plan": "plan.yaml", "--format": "slurm"},
    "run": {"script": "missing.py"},  # so that nothing trains
    "track": {"directory": "run", "--to": "tensorboard"},
}
"""What a command needs beside the flag that is tried."""
INSTEAD = {"--model-size": "--model", "--node-type": "--gpu", "--cluster": "--gpu"}
APART = frozenset({"ui", "bench"})
"""The first has a test of its own below; the second loads torch, and reads what it is given as the others do."""


def texts(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """The flags and arguments of a command, or of those below it, that take any text."""
    if hasattr(command, "commands"):
        for below, each in command.commands.items():
            yield from texts(f"{name} {below}", each)
        return
    for parameter in command.params:
        if parameter.type.name.split()[0] not in ("int", "integer", "float", "boolean", "choice"):
            flag = max(parameter.opts, key=len)
            yield name, flag


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSPLAN_DB", str(tmp_path / "runs.sqlite"))
    Path("run").mkdir()
    return tmp_path


def is_text(printed: str) -> bool:
    return len(printed) < MOST_PRINTED and all(letter.isprintable() or letter == "\n" for letter in printed)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - APART))
@pytest.mark.sweep(every=3)
def test_whatever_a_flag_is_given_is_printed_as_text(cli: Cli, here: Path, name: str) -> None:
    for command, flag in texts(name, load_command(name)):
        beside = {
            other: value for other, value in GIVEN.get(command, {}).items() if other not in (flag, INSTEAD.get(flag))
        }
        for text in (HOSTILE, LONG):
            words = [part for other, value in {**beside, flag: text}.items() for part in _words(other, value)]
            printed = cli(command, *words)
            assert is_text(printed.out), (command, flag, printed.out[:300])
            assert is_text(printed.err), (command, flag, printed.err[:300])


def _words(name: str, value: str) -> list[str]:
    return [name, value] if name.startswith("-") else [value]


def test_what_files_say_is_printed_as_text(cli: Cli, here: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (model := here / HOSTILE.replace("/", "")).mkdir()
    config = {"model_type": "llama", "intermediate_size": 128, **shape, "_name_or_path": HOSTILE}
    (model / "config.json").write_text(json.dumps(config))
    question = ("--model", model, "--gpu", "A100-SXM4-80GB")
    assert cli("recommend --out plans", *question).status == 0
    plan = Path("plans/plan-1.yaml")
    assert yaml.safe_load(plan.read_text())["model"]["name"] == HOSTILE
    run = Path("run")
    row = {"event": "step", "step": 0, "global_step": 1, "loss": 4.0, "seconds": 0.5, "measured_by": HOSTILE}
    (run / "metrics-rank0.jsonl").write_text(json.dumps(row) + "\n")
    beat = {"rank": 0, "host": HOSTILE, "section": HOSTILE, "time": 0.0, "has_ended": False}
    (run / "rank0.heartbeat").write_text(json.dumps(beat))
    for line, more in (
        ("recommend", question),
        ("estimate", question),
        ("max", question),
        ("explain", [plan]),
        ("watch", [run]),
        ("models", [HOSTILE]),
    ):
        printed = cli(line, *more)
        assert printed.status in (0, 1), printed
        assert is_text(printed.out), (line, printed.out)
        assert is_text(printed.err), (line, printed.err)
    assert cli("recommend --json", *question).json["plans"][0]["model"]["name"] == HOSTILE


def test_a_host_that_is_no_name_is_refused() -> None:
    for host in (HOSTILE, LONG):
        with pytest.raises(DsplanError, match="--host") as refused, _open_listener(ServerOptions(host=host, port=0)):
            pass
        assert len(str(refused.value)) < 300


def test_a_notice_is_text_line_by_line() -> None:
    assert label_lines(f"one\x1b[31m\n{LONG}").split("\n")[0] == f"{LABEL}one[31m"
    assert len(label_lines(LONG)) < MOST_PRINTED
