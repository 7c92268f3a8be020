"""Pages that are generated are fresh, and links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cluster.cluster_file import KEYS
from scripts.report import recommendation_table
from tests.dsplan.cli import Cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOMS = ("dsplan", "strategies", "planner", "hardware_db", "scripts", "tests")


GENERATED = {
    "generate.cli_reference": 1,
    "report.recommendation_table": None,
    "report.accuracy_report": 8,
    "report.zero_report": 1,
    "report.public_scripts": 2,
    "report.public_recipes": 64,
    "report.first_plans": None,
    "report.post_training": 2,
    "report.known_faults": None,
    "report.failure_logs": None,
    "report.data_licences": 2,
    "report.config_files": 1,
}
"""The scripts that write pages, and the cores on which the suite has each write its page (None: it takes too long)."""


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
@pytest.mark.parametrize("script", GENERATED)
@pytest.mark.sweep(suite=lambda script, cores: GENERATED[script] == cores)
def test_generated_pages_are_fresh_on_any_machine(script: str, cores: int) -> None:
    """On cores that are not there, of a processor that is not here."""
    command = [sys.executable, "-m", "scripts.ci.other_machine", str(cores), f"scripts.{script}", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("model", ["opt-125m", "bert-large"])
@pytest.mark.sweep(every=2)
def test_recommendations_are_fresh(model: str) -> None:
    """Two models of the page, which the long checks make whole."""
    page = recommendation_table.TARGET.read_text(encoding="utf-8")
    section = page.partition(f"\n## {model}\n")[2].partition("\n## ")[0]
    assert section.strip().splitlines()[2:] == [line.rstrip() for line in recommendation_table.rows(model)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    """Every `planner/…`, `docs/…` and the like in backquotes is there."""
    named = re.findall(
        r"`((?:planner|strategies|hardware_db|dsplan|docs|scripts|tests)/[\w./-]*)`",
        page.read_text("utf-8"),
    )
    assert not [name for name in named if not (ROOT / name).exists()]


ELSEWHERE = {
    "main.py",
    "train.py",
    "stage_1_and_2.py",
    "stage3.py",
    "partitioned_param_coordinator.py",
    "zero_to_fp32.py",
}
"""A reader's own scripts, and files of DeepSpeed."""


def test_files_that_pages_name_without_their_folder_exist() -> None:
    """`policy.py` and the like: some file of the repository ends so."""
    files = [f"/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    named = set(re.findall(r"`([\w/-]+\.py)`", text)) - ELSEWHERE
    assert len(named) > 50
    assert sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files)) == []


def rows_of_changes() -> list[tuple[str, list[str], list[str]]]:
    """CONTRIBUTING's table: what changes, the files and folders to open, and those of its proof."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Where things go")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    path = re.compile(rf"`((?:docs|{'|'.join(ROOMS)})/[\w./-]*|mkdocs\.yml|pyproject\.toml|constraints\.txt)`")
    return [(change.strip(), path.findall(opened), path.findall(proof)) for change, opened, proof in rows]


def test_twenty_five_kinds_of_change_have_a_row() -> None:
    changes = [change for change, *_ in rows_of_changes()]
    assert len(changes) == len(set(changes)) >= 25


@pytest.mark.parametrize("row", rows_of_changes(), ids=lambda row: row[0])
def test_a_kind_of_change_leads_to_files_that_are_there(row: tuple[str, list[str], list[str]]) -> None:
    change, opened, proof = row
    assert opened, f"{change}: no file to open"
    assert [name for name in (*opened, *proof) if not (ROOT / name).exists()] == []


def shown_commands() -> list[str]:
    """The planning commands that pages show, without comments and without those that hold a placeholder."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = re.findall(r"^ *\$ dsplan ((?:recommend|estimate|models|devices|probe).*)$", text, flags=re.MULTILINE)
    return sorted({line.split("#")[0].strip() for line in lines if "NAME" not in line})


CONFIG = """\
base_model: meta-llama/Llama-3.1-8B
sequence_len: 2048
micro_batch_size: 4
"""
"""A reader's own config, where a page names one."""


@pytest.mark.parametrize("command", shown_commands())
@pytest.mark.sweep(
    every=2, suite=lambda command: "--exact" not in command
)  # traces take seconds; test_exact.py has small ones
def test_commands_that_pages_show_work(command: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(CONFIG)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    assert cli("", *shlex.split(command)).status == 0


def test_the_planning_snippet_of_the_start_page_runs() -> None:
    snippet = next(code for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL))
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["best"].verdict in ("fits", "tight")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_training_script_of_the_docs_trains_and_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorials/first-training.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DSPLAN_HOME": str(tmp_path / "home"), "DSPLAN_QUIET": "1"}
    runs = [
        subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert [run.rpartition(", loss")[0] for run in runs] == ["epoch 0, step 8", "epoch 1, step 16"]


def test_the_fields_that_the_docs_name_are_those_that_are_printed(cli: Cli) -> None:
    page = (ROOT / "docs/reference/scripting.md").read_text(encoding="utf-8")
    printed = cli("estimate --model opt-125m --gpus 2 --gpu A100-SXM4-80GB --json").json
    rows = dict(re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", page, re.MULTILINE))
    groups = {group: fields for names, fields in rows.items() for group in re.findall(r"`(\w+)`", names)}
    assert set(printed) <= set(groups)
    for group, figures in printed.items():
        if isinstance(figures, dict) and group != "provenance":
            assert set(re.findall(r"`(\w+)`", groups[group])) == set(figures)


def test_the_cluster_file_of_the_docs_is_read(cli: Cli, tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/scripting.md").read_text(encoding="utf-8")
    path = tmp_path / "cluster.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    printed = cli("recommend --model opt-125m --json --cluster", path).json
    assert printed["plans"][0]["cluster"]["gpus"] == 32
    section = page.partition("## A cluster file")[2].partition("\n## ")[0]
    keys = [key for row in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)]
    assert sorted(keys) == sorted(KEYS)
