"""The page that lists every memory term against the code that it says counts them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "explanation" / "cost-model.md").read_text(encoding="utf-8")
NUMBERS = [*map(str, range(1, 28)), "15b"]
FOLDERS = ("", "planner/cost/memory")


def terms() -> list[tuple[str, str, str, str]]:
    """Number, effect, where it is counted, what is left out, for every row of the table."""
    section = PAGE.split("## Every term", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(number.strip(), effect.strip(), where.strip(), out.strip()) for number, effect, where, out in rows]


def test_every_term_that_is_known_has_one_row() -> None:
    assert sorted(number for number, *_ in terms() if number) == sorted(NUMBERS)


@pytest.mark.parametrize("term", terms(), ids=lambda term: term[1])
def test_a_term_is_counted_where_the_row_says_or_its_size_stands_there(term: tuple[str, str, str, str]) -> None:
    _, effect, where, out = term
    assert effect
    names = re.findall(r"`((?:planner|strategies)[\w.]+)`", where)
    if not names:
        assert re.search(r"\d", out), f"{effect}: neither counted nor given a size"
    assert all(is_defined(name) for name in names), where


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module of this repository, or a function or class at the top of one."""
    if (ROOT / (name.replace(".", "/") + ".py")).is_file():
        return True
    module, _, attribute = name.rpartition(".")
    file = ROOT / (module.replace(".", "/") + ".py")
    if not file.is_file():
        return False
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return any(getattr(node, "name", None) == attribute for node in body)


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", PAGE))
    assert named
    elsewhere = {"stage_1_and_2.py", "stage3.py", "partitioned_param_coordinator.py"}  # DeepSpeed's
    missing = [name for name in named - elsewhere if not any((ROOT / folder / name).is_file() for folder in FOLDERS)]
    assert missing == []
