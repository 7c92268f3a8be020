"""Names and docstrings of the four rooms say what things hold and do, as far as a machine can tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("hardware_db", "planner", "strategies", "dsplan")
VAGUE = {"found", "place", "made", "known", "asked", "way", "said", "done"}
QUESTIONS = {"What", "Whether", "How", "Where", "Why", "Which", "When", "Who", "Whose"}


def bound_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable, argument and loop variable, but for fields of classes."""
    classes = (node.body for node in nodes if isinstance(node, ast.ClassDef))
    fields = {id(line.target) for body in classes for line in body if isinstance(line, ast.AnnAssign)}
    for node in nodes:
        if id(node) in fields:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def first_words(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and first word of every docstring."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words:
                yield getattr(node, "lineno", 1), words[0]


def test_both_are_seen() -> None:
    body = ('    """How."""', "    with x as (found, _):", "        for place in y:", "            (done := 1)")
    nodes = [*ast.walk(ast.parse("\n".join(("def f(way):", *body, "class C:", "    known: int = 0"))))]
    assert {name for _, name in bound_names(nodes)} == {"way", "found", "_", "place", "done"}
    assert list(first_words(nodes)) == [(1, "How.")]


@pytest.mark.parametrize("room", ROOMS)
def test_names_and_docstrings_are_plain(room: str) -> None:
    problems = []
    for path in sorted((ROOT / room).rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        named = [(line, f"{name} does not say what it holds") for line, name in bound_names(nodes) if name in VAGUE]
        begun = [(line, f"a docstring begins with {word}") for line, word in first_words(nodes) if word in QUESTIONS]
        problems += [f"{path.relative_to(ROOT)}:{line}: {problem}" for line, problem in sorted(named + begun)]
    assert not problems, "\n".join(problems)
