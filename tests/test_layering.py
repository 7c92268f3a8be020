"""Imports go dsplan -> strategies -> planner -> hardware_db, and planning never needs torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("hardware_db", "planner", "strategies", "dsplan")
HEAVY = {"torch", "numpy", "transformers", "accelerate", "deepspeed", "psutil", "safetensors", "hypothesis", "pytest"}
MAY_BE_HEAVY = (
    *("strategies/", "dsplan/diagnostics/", "dsplan/mpi/", "hardware_db/microbench/"),
    *("dsplan/trainer.py", "dsplan/exact/answer.py"),  # what trains, and what a process of the tracer's runs
)

FILES = sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
LIGHT = [path for path in FILES if not path.startswith(MAY_BE_HEAVY)]


def _last_name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
            literals = (item.value for item in node.args if isinstance(item, ast.Constant))
            yield from (value for value in literals if isinstance(value, str))


def when_loaded(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not function bodies, not what only type checkers read."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def test_the_walk_sees_imports_in_functions_and_skips_type_checking() -> None:
    tree = ast.parse(
        "if TYPE_CHECKING:\n    import torch\ndef f():\n    import planner\n    import_module('dsplan.x')\nimport os\n"
    )
    assert set(imported(ast.walk(tree))) == {"torch", "planner", "dsplan.x", "os"}
    assert set(imported(when_loaded(tree))) == {"os"}


def packages(nodes: Iterator[ast.AST]) -> set[str]:
    return {name.split(".")[0] for name in imported(nodes)}


def parsed(path: str, names: set[str]) -> ast.Module:
    """The module, empty where no line of its text imports one of the packages: to parse all takes seconds."""
    text = (ROOT / path).read_text("utf-8")
    return ast.parse(text if re.search(rf"\b(?:from\s+|import.*\b)(?:{'|'.join(names)})\b", text) else "")


def test_no_text_with_an_import_is_passed_over(tmp_path: Path) -> None:
    for line in ("import os, torch", "from torch.nn import Module", "if 1: import torch.nn", "import_module('torch')"):
        (tmp_path / "a.py").write_text(line)
        assert parsed(str(tmp_path / "a.py"), {"torch", "numpy"}).body, line
    (tmp_path / "a.py").write_text("import torchdata  # for torch")
    assert set(imported(ast.walk(parsed(str(tmp_path / "a.py"), {"torch"})))) == {"torchdata"}
    (tmp_path / "a.py").write_text("import os\n# torch")
    assert not parsed(str(tmp_path / "a.py"), {"torch"}).body


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_imports_point_to_rooms_below(room: str) -> None:
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    upwards = {path: above & packages(ast.walk(parsed(path, above))) for path in FILES if path.startswith(f"{room}/")}
    assert upwards
    assert not {path: names for path, names in upwards.items() if names}


def test_planning_loads_no_heavy_package() -> None:
    heavy = {path: HEAVY & packages(when_loaded(parsed(path, HEAVY))) for path in LIGHT}
    assert not {path: names for path, names in heavy.items() if names}
