"""Pages that are generated are fresh, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from front_cli import Cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("script", ["build_cli_reference", "build_recommendation_table"])
def test_generated_pages_are_fresh(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    """Every `planner/…`, `docs/…` and the like in backquotes is there."""
    named = re.findall(
        r"`((?:planner|strategies|hardware_db|dsplan|docs|scripts|tests)/[\w./-]*)`", page.read_text("utf-8")
    )
    assert not [name for name in named if not (ROOT / name).exists()]


def shown_commands() -> list[str]:
    """The planning commands that pages show, without comments and without those that hold a placeholder."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = re.findall(r"^ *\$ dsplan ((?:recommend|estimate|models|devices|probe).*)$", text, flags=re.MULTILINE)
    return sorted({line.split("#")[0].strip() for line in lines if "NAME" not in line})


@pytest.mark.parametrize("command", shown_commands())
def test_commands_that_pages_show_work(command: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("", *shlex.split(command)).status == 0


def test_the_planning_snippet_of_the_start_page_runs() -> None:
    snippet = next(code for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL))
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["best"].verdict in ("fits", "tight")  # type: ignore[attr-defined]
