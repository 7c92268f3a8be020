"""Names and docstrings say what things hold and do, as far as a machine can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hardware_db", "planner", "strategies", "dsplan", "scripts", "tests")
VAGUE = {"found", "place", "made", "known", "asked", "way", "said", "done"}
QUESTIONS = {"What", "Whether", "How", "Where", "Why", "Which", "When", "Who", "Whose"}


MAY_BIND = re.compile(rf"\b(?:{'|'.join(VAGUE)})\s*(?:[=:,)\]]|$|\bin\b)", re.MULTILINE)
"""Text beside which one of these names may be bound: a file without any is not looked through."""
MAY_BEGIN = re.compile(rf"""["']\\?\s*(?:{"|".join(QUESTIONS)})\b""")
"""The same of docstrings."""


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable, argument and loop variable, but for fields of classes."""
    nodes = [*ast.walk(tree)]
    classes = (node.body for node in nodes if isinstance(node, ast.ClassDef))
    fields = {id(line.target) for body in classes for line in body if isinstance(line, ast.AnnAssign)}
    for node in nodes:
        if id(node) in fields:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def first_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and first word of every docstring."""
    waiting: list[ast.AST] = [tree]
    while waiting:  # statements alone, a tenth of all nodes
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words:
                yield getattr(node, "lineno", 1), words[0]
        for block in ("body", "orelse", "finalbody", "handlers"):
            waiting += [part for part in getattr(node, block, ()) if isinstance(part, ast.stmt | ast.ExceptHandler)]


def test_both_are_seen() -> None:
    body = ('    """How."""', "    with x as (found, _):", "        for place in y:", "            (done := 1)")
    text = "\n".join(("def f(way):", *body, "class C:", "    known: int = 0"))
    tree = ast.parse(text)
    assert {name for _, name in bound_names(tree)} == {"way", "found", "_", "place", "done"}
    assert list(first_words(tree)) == [(1, "How.")]
    assert [match[0][:4] for match in MAY_BIND.finditer(text)] == ["way)", "foun", "plac", "done", "know"]
    assert MAY_BEGIN.search(text)
    assert MAY_BEGIN.search('"""\n    Whose turn it is."""')
    assert not MAY_BEGIN.search('"""Whoever asks."""')


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_and_docstrings_are_plain(folder: str) -> None:
    problems = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        binds, begins = MAY_BIND.search(text), MAY_BEGIN.search(text)
        if not binds and not begins:
            continue
        tree = ast.parse(text)
        bound, words = bound_names(tree) if binds else (), first_words(tree) if begins else ()
        named = [(line, f"{name} does not say what it holds") for line, name in bound if name in VAGUE]
        begun = [(line, f"a docstring begins with {word}") for line, word in words if word in QUESTIONS]
        problems += [f"{path.relative_to(ROOT)}:{line}: {problem}" for line, problem in sorted(named + begun)]
    assert not problems, "\n".join(problems)
