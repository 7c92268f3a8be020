"""The lines that only a card reaches, and those of them that a process has run.

Statements that name CUDA, streams or pinned memory, and the branches that a card takes. A process whose CUDA_LINES
names a folder writes there what it runs of them, once each: the statements themselves say so, which tracing would not
see in autograd's threads.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = ("strategies", "hardware_db", "dsplan")
_NAMES = {"cuda", "is_cuda", "pin_memory", "record_stream", "wait_stream", "wait_event", "record_event", "non_blocking"}
_CARD_CLASSES = ("Cuda", "Stream", "_OnHost", "_OnDevice")
_HIT = "__cuda_line__"
_MAY_NAME = re.compile(
    r"cuda|nccl|device\S*\.type|pin_memory|non_blocking|on_gpu|on_device|_stream|_event", re.IGNORECASE
)


def lines_of(source: str) -> dict[int, ast.AST]:
    """Return the nodes of a module that only a card reaches, or that ask whether there is one, by line."""
    finder = _Lines()
    if _MAY_NAME.search(source):
        finder.visit(ast.parse(source))
    return finder.nodes


def is_for_cards(test: ast.expr) -> bool | None:
    """Return whether a condition holds on a card; None where it does not ask for one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = is_for_cards(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        return next((answer for value in test.values if (answer := is_for_cards(value)) is not None), None)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        kind, value = test.comparators[0].value, ast.unparse(test.left)
        if value.split(".")[-1] in ("type", "kind") and kind in ("cuda", "cpu"):
            return (kind == "cuda") == isinstance(test.ops[0], ast.Eq)
        return None
    text = ast.unparse(test)
    return True if text.endswith(("cuda.is_available()", ".is_cuda", "_on_gpu", "on_gpu", "on_device")) else None


class _Lines(ast.NodeVisitor):
    def __init__(self) -> None:
        self.nodes: dict[int, ast.AST] = {}
        self._inside = 0

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            own = [part for part in ast.iter_child_nodes(node) if not isinstance(part, (ast.stmt, ast.ExceptHandler))]
            is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom))
            if not is_definition and (self._inside or any(_names_cuda(part) for part in own)):
                self.nodes[node.lineno] = node
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node.body, is_card=False)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node.body, is_card=any(part in node.name for part in _CARD_CLASSES))

    def visit_If(self, node: ast.If) -> None:
        side = is_for_cards(node.test)
        self.visit(node.test)
        self._within(node.body, is_card=side is True)
        self._within(node.orelse, is_card=side is False)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        side = is_for_cards(node.test)
        if side is not None:
            self.nodes[-node.lineno] = node
        self.generic_visit(node)

    def _within(self, body: Sequence[ast.stmt], *, is_card: bool) -> None:
        before = self._inside
        self._inside += is_card
        for statement in body:
            self.visit(statement)
            if isinstance(statement, ast.If) and is_for_cards(statement.test) is False and _leaves(statement.body):
                self._inside += 1  # what follows is for cards
        self._inside = before


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names_cuda(node: ast.AST) -> bool:
    for part in ast.walk(node):
        name = getattr(part, "attr", None) or getattr(part, "id", None) or getattr(part, "arg", None)
        is_text = isinstance(part, ast.Constant) and part.value in ("cuda", "nccl")
        if name in _NAMES or is_text or (name == "type" and "device" in ast.unparse(part)):
            return True
    return False


class _Marked(ast.NodeTransformer):
    """Has every such line say that it runs."""

    def __init__(self, nodes: dict[int, ast.AST], path: str) -> None:
        self._lines = {id(node): line for line, node in nodes.items()}
        self._path = path

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [part for each in body for part in self._marked(each)])
        if isinstance(node, ast.IfExp) and id(node) in self._lines:
            side = "body" if is_for_cards(node.test) else "orelse"
            marked = ast.Tuple(elts=[self._call(self._lines[id(node)], node), getattr(node, side)], ctx=ast.Load())
            setattr(node, side, ast.Subscript(value=marked, slice=ast.Constant(value=1), ctx=ast.Load()))
        return ast.fix_missing_locations(node)

    def _marked(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if id(statement) in self._lines:
            yield ast.copy_location(ast.Expr(value=self._call(self._lines[id(statement)], statement)), statement)
        yield statement

    def _call(self, line: int, node: ast.AST) -> ast.Call:
        arguments: list[ast.expr] = [ast.Constant(value=self._path), ast.Constant(value=line)]
        call = ast.Call(func=ast.Name(id=_HIT, ctx=ast.Load()), args=arguments, keywords=[])
        return ast.copy_location(call, node)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        source = Path(self.path).read_text(encoding="utf-8")
        if not _MAY_NAME.search(source):
            return super().get_code(fullname)
        tree = ast.parse(source)
        finder = _Lines()
        finder.visit(tree)
        path = str(Path(self.path).resolve().relative_to(ROOT))
        return compile(_Marked(finder.nodes, path).visit(tree), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in ROOMS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and (spec.origin or "").startswith(str(ROOT)):
            spec.loader = _Loader(name, spec.origin or "")
        return spec


def install(folder: str) -> None:
    """Have this process and those that it starts write to `folder` what they run."""
    import builtins

    seen: set[tuple[str, int]] = set()

    def hit(path: str, line: int) -> None:
        if (path, line) not in seen:
            seen.add((path, line))
            with open(os.path.join(folder, str(os.getpid())), "a", encoding="utf-8") as file:
                file.write(f"{path}:{line}\n")

    named: Any = builtins
    setattr(named, _HIT, hit)
    sys.meta_path.insert(0, _Finder())
