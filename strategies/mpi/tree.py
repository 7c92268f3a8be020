"""Nested dicts, lists and tuples: taken apart into leaves in an order that all ranks share, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from strategies.errors import CannotRun

Tree = Any
Key = str | int
Path = tuple[Key, ...]


def leaves(tree: Tree) -> dict[Path, Any]:
    """Every leaf by its path; a dict's keys in sorted order, because ranks may have filled theirs in different orders.

    Raises:
        CannotRun: a key is neither a text nor a whole number, or two keys of one dict read the same.
    """
    return dict(_walk(tree, ()))


def name_of(path: Path) -> str:
    """How a leaf is called in messages and files: `blocks/0/weight`."""
    return "/".join(str(key) for key in path) or "(the value itself)"


def rebuilt(tree: Tree, replace: Callable[[Path], Any], path: Path = ()) -> Tree:
    """The same dicts, lists and tuples around other leaves; what is a Mapping becomes a dict."""
    if isinstance(tree, Mapping):
        return {key: rebuilt(value, replace, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        members = [rebuilt(value, replace, (*path, index)) for index, value in enumerate(tree)]
        if isinstance(tree, list):
            return members
        return type(tree)(*members) if hasattr(tree, "_fields") else tuple(members)
    return replace(path)


def subtree(tree: Tree, path: Path) -> Tree:
    """What lies at a path.

    Raises:
        CannotRun: nothing does; the message names the keys there are.
    """
    for depth, key in enumerate(path):
        keys = list(tree) if isinstance(tree, Mapping) else list(range(len(tree))) if _is_sequence(tree) else []
        if key not in keys:
            there = ", ".join(repr(one) for one in keys[:8]) or "nothing"
            raise CannotRun(f"there is no {name_of(path[: depth + 1])!r}; {name_of(path[:depth])} has {there}")
        tree = tree[key]
    return tree


def _is_sequence(tree: Tree) -> bool:
    return isinstance(tree, (list, tuple))


def _walk(tree: Tree, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, Mapping):
        for key in _sorted_keys(tree, path):
            yield from _walk(tree[key], (*path, key))
    elif _is_sequence(tree):
        for index, value in enumerate(tree):
            yield from _walk(value, (*path, index))
    else:
        yield path, tree


def _sorted_keys(tree: Mapping[Any, Any], path: Path) -> list[Key]:
    for key in tree:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise CannotRun(f"{name_of(path)}: the key {key!r} is neither a text nor a whole number; rename it")
    ordered = sorted(tree, key=str)
    for first, second in pairwise(ordered):
        if str(first) == str(second):
            raise CannotRun(f"{name_of(path)}: the keys {first!r} and {second!r} read the same; rename one")
    return ordered
