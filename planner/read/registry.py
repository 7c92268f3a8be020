"""torchtitan's Python registries of configs as settings: functions are looked at as text, and never run.

A registry is a module whose functions return `Trainer.Config(...)`; `--config NAME` of torchtitan calls one of them
(pytorch/torchtitan@b5bcd76c `torchtitan/config/manager.py`, `torchtitan/models/*/config_registry.py`). Calls are kept
as what they are called with, numbers are worked out, and functions of the same file are followed. What depends on
anything else is a value that is known when it runs only.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from hardware_db.errors import BrokenFile, UnknownName
from hardware_db.records import dataclass
from planner.read.form import Setting, Source, Unresolved

_MOST_DEPTH = 50
_MOST_STEPS = 20_000
"""Expressions of one config; those of torchtitan have some hundred."""
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_MOST = 2**63
_NOT_FOLLOWED = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AugAssign, ast.Delete)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A value with the expression that says it."""

    value: Any
    """A constant, a list of values, a `Called`, or an `Unresolved`."""
    node: ast.expr


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """A call by the name of what is called; its arguments may be set anew, those by index are named by it."""

    name: str
    arguments: dict[str, Written] = field(default_factory=dict)


def config_names(source: Source) -> list[str]:
    """Return the names of the functions that return a config.

    Raises:
        BrokenFile: the text is no Python.
    """
    return [name for name, function in _functions(source).items() if _returns_config(function)]


def registry_settings(source: Source, name: str | None) -> list[Setting]:
    """Return the settings of the config that a function of a registry returns, under torchtitan's names of flags.

    `name` is that function's; None takes the only one.

    Raises:
        BrokenFile: the text is no Python, or no function of it returns a config, or several do and none is named.
        UnknownName: no function has this name.
    """
    functions = _functions(source)
    names = [name for name, function in functions.items() if _returns_config(function)]
    if name is None:
        if not names:
            raise BrokenFile(source.path, "has no function that returns a Trainer.Config", "name a config or a script")
        if len(names) > 1:
            problem = f"holds {len(names)} configs ({', '.join(names[:4])}{' …' if len(names) > 4 else ''})"
            raise BrokenFile(source.path, problem, f"name one: {source.path}:{names[0]}")
        name = names[0]
    elif name not in functions:
        raise UnknownName("config", name, names, hint=f"{source.path} has {len(names)}")
    try:
        returned = _Reader(source, functions).call(name)
    except RecursionError:
        raise BrokenFile(source.path, f"{name} is nested too deep", "name another config") from None
    if not isinstance(returned, Called):
        raise BrokenFile(source.path, f"{name} returns no config that its text says", "name another one")
    if not returned.name.endswith("Config"):
        problem = f"{name} builds on {returned.name}(…), whose text is in another file"
        raise BrokenFile(f"{source.path}, line {functions[name].lineno}", problem, "name the config that it builds on")
    return list(_Flattened(source, functions[name].lineno).config(returned))


def _functions(source: Source) -> dict[str, ast.FunctionDef]:
    try:
        module = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        line = f", line {problem.lineno}" if isinstance(problem, SyntaxError) and problem.lineno else ""
        reason = problem.msg if isinstance(problem, SyntaxError) else "nested too deep"
        raise BrokenFile(f"{source.path}{line}", f"is not Python ({reason})", "correct it there") from None
    return {item.name: item for item in module.body if isinstance(item, ast.FunctionDef)}


def _returns_config(function: ast.FunctionDef) -> bool:
    is_public = not function.name.startswith("_")
    return is_public and function.returns is not None and ast.unparse(function.returns).endswith("Trainer.Config")


class _Reader:
    """Follows functions of one file from their first line to what they return."""

    def __init__(self, source: Source, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.source, self.functions = source, functions
        self.steps = self.depth = 0

    def call(self, name: str, arguments: Mapping[str, Written] | None = None) -> Any:
        """Return what a function of the file returns; arguments that are not given have their defaults.

        Raises:
            BrokenFile: functions call each other without end.
        """
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise BrokenFile(self.source.path, f"{name} calls itself without end", "name another config")
        function, values = self.functions[name], dict[str, Written]()
        parameters = [*function.args.posonlyargs, *function.args.args]
        plain = parameters[len(parameters) - len(function.args.defaults) :]
        defaults = [*zip(plain, function.args.defaults, strict=True)]
        defaults += [
            (parameter, default)
            for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if default is not None
        ]
        for parameter, default in defaults:
            values[parameter.arg] = self.evaluate(default, {})
        for key, value in (arguments or {}).items():
            index = int(key) if key.isdigit() else -1
            values[parameters[index].arg if 0 <= index < len(parameters) else key] = value
        returned = self._body(function.body, values)
        self.depth -= 1
        return returned

    def _body(self, statements: list[ast.stmt], values: dict[str, Written]) -> Any:
        for statement in statements:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.evaluate(statement.value, values).value
            if isinstance(statement, ast.Assign):
                value = self.evaluate(statement.value, values)
                for target in statement.targets:
                    self._assign(target, value, values)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self.evaluate(statement.value, values), values)
            elif isinstance(statement, _NOT_FOLLOWED) or (
                isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
            ):
                self._leave(statement, values)
        return None

    def _assign(self, target: ast.expr, value: Written, values: dict[str, Written]) -> None:
        if isinstance(target, ast.Name):
            values[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value, values).value
            if isinstance(owner, Called):
                owner.arguments[target.attr] = value

    def _leave(self, statement: ast.stmt, values: dict[str, Written]) -> None:
        """Note in every config at hand that a statement, such as a branch or a loop, was not followed."""
        text = ast.unparse(statement).partition("\n")[0]
        note = Written(value=Unresolved(text=text), node=ast.Constant(value=text, lineno=statement.lineno))
        for value in values.values():
            if isinstance(value.value, Called):
                value.value.arguments.setdefault(f"line {statement.lineno}", note)

    def evaluate(self, node: ast.expr, values: Mapping[str, Written]) -> Written:
        """Return what an expression comes to, as far as its text says it.

        Raises:
            BrokenFile: there is too much of it.
        """
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise BrokenFile(self.source.path, f"a config takes more than {_MOST_STEPS:,} steps", "name another config")
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        return Written(value=self._value(node, values), node=node)

    def _value(self, node: ast.expr, values: Mapping[str, Written]) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.evaluate(item, values).value for item in node.elts]
        if isinstance(node, ast.Call):
            return self._call(node, values)
        if isinstance(node, ast.Attribute):
            owner = self.evaluate(node.value, values).value
            if isinstance(owner, Called) and node.attr in owner.arguments:
                return owner.arguments[node.attr].value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.evaluate(node.operand, values).value
            return -inner if _is_number(inner) else Unresolved(text=ast.unparse(node))
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._arithmetic(node, values)
        return Unresolved(text=ast.unparse(node))

    def _arithmetic(self, node: ast.BinOp, values: Mapping[str, Written]) -> Any:
        left, right = self.evaluate(node.left, values).value, self.evaluate(node.right, values).value
        if _is_number(left) and _is_number(right) and not (right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv)):
            result = _ARITHMETIC[type(node.op)](left, right)
            if abs(result) < _MOST:
                return result
        return Unresolved(text=ast.unparse(node))

    def _call(self, node: ast.Call, values: Mapping[str, Written]) -> Any:
        name = ast.unparse(node.func)
        arguments = {str(index): self.evaluate(item, values) for index, item in enumerate(node.args)}
        arguments |= {item.arg: self.evaluate(item.value, values) for item in node.keywords if item.arg is not None}
        if name in self.functions:
            returned = self.call(name, arguments)
            return Unresolved(text=ast.unparse(node)) if returned is None else returned
        last = name.rpartition(".")[2]
        first = arguments["0"].value if "0" in arguments else None
        if last == "replace" and isinstance(first, Called):
            changed = {key: value for key, value in arguments.items() if key != "0"}
            return Called(name=first.name, arguments={**first.arguments, **changed})
        if last in ("deepcopy", "cast") and arguments:
            return list(arguments.values())[-1].value
        return Called(name=name, arguments=arguments)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


_MODES: Mapping[str, str] = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}
"""By the class; one with a memory budget counts as full."""


class _Flattened:
    """Yields a config's settings: nested ones by dots, and what classes choose under the names that flags had."""

    def __init__(self, source: Source, line: int) -> None:
        self.source, self.line = source, line

    def config(self, root: Called) -> Iterator[Setting]:
        """Yield every setting of a `Trainer.Config`; without a choice it recomputes selectively."""
        if "activation_checkpoint" not in root.arguments:
            yield Setting(key="activation_checkpoint.mode", value="selective", source=self.source, line=self.line)
        for key, written in root.arguments.items():
            value = written.value
            if key == "model_spec" and isinstance(value, Called):
                yield from self._model(value, written.node)
            elif key == "activation_checkpoint":
                mode = _MODES.get(value.name, "full") if isinstance(value, Called) else "none"
                yield self._setting(f"{key}.mode", mode, written.node)
            elif key in ("loss", "optimizer") and isinstance(value, Called):
                yield self._setting(key, value.name, written.node)
            else:
                yield from self._nested("", Called(name=root.name, arguments={key: written}))

    def _nested(self, prefix: str, called: Called) -> Iterator[Setting]:
        for key, written in called.arguments.items():
            value = written.value
            if isinstance(value, Called) and value.name.endswith("Config"):
                yield from self._nested(f"{prefix}{key}.", value)
            else:
                value = Unresolved(text=f"{value.name}(…)") if isinstance(value, Called) else value
                yield self._setting(f"{prefix}{key}", value, written.node)

    def _model(self, spec: Called, node: ast.expr) -> Iterator[Setting]:
        """Yield the flavor of a model, and what its converters make of its layers."""
        for key, written in spec.arguments.items():
            if key == "converters" and isinstance(written.value, list):
                called = [item for item in written.value if isinstance(item, Called)]
                names = [item.name.removesuffix(".Config") for item in called]
                yield self._setting("model.converters", ",".join(names), written.node)
                for item in called:
                    section = "lora" if item.name.startswith("LoRA") else "float8"
                    kept = {name: part for name, part in item.arguments.items() if not name.isdigit()}
                    yield from self._nested(f"{section}.", Called(name=item.name, arguments=kept))
            else:
                yield self._setting("model.flavor" if key == "0" else f"model.{key}", written.value, written.node)

    def _setting(self, key: str, value: Any, node: ast.expr) -> Setting:
        if isinstance(value, list) and any(isinstance(item, Called) for item in value):
            value = [item.name if isinstance(item, Called) else item for item in value]
        return Setting(key=key, value=value, source=self.source, line=node.lineno)
