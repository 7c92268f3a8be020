"""YAML and JSON files that people hand in, read so that nothing in them can hang, crash or be lost in silence.

Refused with the place and a remedy: what cannot be read, is not text, is too large or nested too deep, a key that is
there twice, and a number that is not finite.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile

MOST_BYTES = 4 * 2**20
"""A plan takes 4 KiB, and PyYAML some seconds for this much."""
MOST_DEPTH = 100
MOST_VALUES = 2_000_000
"""Also of a YAML file whose anchors make a thousand values out of ten lines."""
_SHOWN = 40
_MOST_DIGITS = 300
"""More of them are no finite number to most that would read it."""
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


def read_text(path: str | Path, remedy: str) -> str:
    """Return the text of a file, a pipe included.

    Raises:
        BrokenFile: it cannot be read, is larger than 4 MiB, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise BrokenFile(path, f"is larger than {MOST_BYTES // 2**20} MiB", remedy)
        return content.decode("utf-8")
    except OSError as problem:
        raise BrokenFile(quote_path(path), f"cannot be read ({problem.strerror})", remedy) from None
    except UnicodeDecodeError as problem:
        raise BrokenFile(path, f"is not text in UTF-8 (byte {problem.start})", remedy) from None
    except ValueError:
        raise BrokenFile(quote_path(path), "cannot be read (a path holds no NUL character)", remedy) from None


def read_json(path: str | Path, remedy: str) -> Any:
    """Return the document in a JSON file.

    Raises:
        BrokenFile: the file cannot be read, is not JSON, or holds what this module refuses.
    """
    return parse_json(read_text(path, remedy), path, remedy)


def parse_json(text: str, where: object, remedy: str) -> Any:
    """Return the document that a text is; `where` is what messages begin with.

    Raises:
        BrokenFile: it is not JSON, or holds what this module refuses.
    """
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as problem:
        problem_at = f"line {problem.lineno} column {problem.colno}: {problem.msg}"
        raise BrokenFile(where, f"is not JSON ({problem_at})", remedy) from None
    except RecursionError:
        raise _too_deep(where, remedy) from None
    except ValueError as problem:  # a key twice, or an integer of more digits than Python reads
        reason = str(problem) if isinstance(problem, _Twice) else "holds a number that is out of range"
        raise BrokenFile(where, reason, remedy) from None
    _check(document, where, remedy)
    return document


def read_yaml(path: str | Path, remedy: str) -> Any:
    """Return the document in a YAML file; a file of JSON is read as JSON, whose small numbers YAML 1.1 takes for text.

    Raises:
        BrokenFile: the file cannot be read, is not YAML, or holds what this module refuses.
    """
    import yaml  # slow to import

    text = read_text(path, remedy)
    if text.lstrip().startswith("{") and _is_json(text):
        return parse_json(text, path, remedy)
    try:
        document = yaml.load(text, Loader=_yaml_loader())
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        position = "" if mark is None else f" at line {mark.line + 1}"
        if isinstance(problem, _yaml_refusal()):
            raise BrokenFile(path, f"{problem.problem}{position}", remedy) from None
        raise BrokenFile(path, f"is not YAML{position} ({problem.problem})", remedy) from None
    except yaml.YAMLError as problem:
        raise BrokenFile(path, f"is not YAML ({' '.join(str(problem).split())})", remedy) from None
    except RecursionError:
        raise _too_deep(path, remedy) from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # PyYAML, of !!bool before what is none
        raise BrokenFile(path, "is not YAML (a tag does not fit its value)", remedy) from None
    _check(document, path, remedy)
    return document


def quote(value: object) -> str:
    """Return a value as a message quotes it: on one line and not longer than a line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}…{text[-8:]}"


def quote_path(path: object) -> str:
    """Return a path as a message begins with it.

    Without characters that end a line or the text, and not longer than one.
    """
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(path))
    return text if len(text) <= 8 * _SHOWN else f"{text[: 4 * _SHOWN]}…{text[-_SHOWN:]}"


class _Twice(ValueError):
    """A key that a mapping has twice; JSON and YAML would take the last without a word."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(f"has the key {quote(next(key for key in keys if keys.count(key) > 1))} twice")
    return mapping


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    except (RecursionError, ValueError):
        pass  # JSON that is refused as such
    return True


def _too_deep(where: object, remedy: str) -> BrokenFile:
    return BrokenFile(where, f"is nested more than {MOST_DEPTH} deep", remedy)


def _check(document: object, where: object, remedy: str) -> None:
    """Hold every value of a document against what may be in one."""
    waiting: list[Iterator[object]] = [iter((document,))]
    seen = 0
    while waiting:
        value = next(waiting[-1], waiting)
        if value is waiting:
            waiting.pop()
            continue
        seen += 1
        if seen > MOST_VALUES:
            raise BrokenFile(where, f"holds more than {MOST_VALUES:,} values", remedy)
        if isinstance(value, dict):
            waiting.append(part for pair in value.items() for part in pair)
        elif isinstance(value, list):
            waiting.append(iter(value))
        elif isinstance(value, str):
            _check_text(value, where, remedy)
        elif not _is_plain(value):
            raise BrokenFile(where, f"holds {quote(value)}, no finite number, text, list or mapping", remedy)
        if len(waiting) > MOST_DEPTH:
            raise _too_deep(where, remedy)


def _is_plain(value: object) -> bool:
    if isinstance(value, int | float):
        try:
            return math.isfinite(value)
        except OverflowError:
            return False
    return value is None


def _check_text(value: str, where: object, remedy: str) -> None:
    """Half of a surrogate pair is legal in JSON and in nothing that stores or prints text."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BrokenFile(where, "holds half of a surrogate pair", remedy) from None


@functools.cache
def _yaml_refusal() -> Any:
    import yaml

    class Refusal(yaml.constructor.ConstructorError):
        """A YAML feature that a file which a person hands in may not have."""

    return Refusal


@functools.cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader, which also refuses a key that is there twice and numbers that mean another one.

    YAML 1.1 reads 010 as 8 and 1:30 as 90. What looks like a date stays the text it is.
    """
    import yaml

    refusal = _yaml_refusal()

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            scalars = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            keys = [(key.tag, key.value) for key in scalars]
            for number, key in enumerate(scalars):
                if keys[number] in keys[:number]:
                    raise refusal(None, None, f"has the key {quote(key.value)} twice", key.start_mark)
            if any(tag.endswith(":merge") for tag, _ in keys):
                raise refusal(None, None, "merges mappings with <<; write the keys out", node.start_mark)

        def whole(self, node: Any) -> int:
            text = str(self.construct_scalar(node))
            if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text):
                raise refusal(None, None, f"has the number {quote(text)}; write decimal digits", node.start_mark)
            return int(text)

        def fraction(self, node: Any) -> float:
            if ":" in str(self.construct_scalar(node)):
                text = quote(self.construct_scalar(node))
                raise refusal(None, None, f"has the number {text}; write decimal digits", node.start_mark)
            return float(self.construct_yaml_float(node))

    readers: dict[str, Any] = {"int": Loader.whole, "float": Loader.fraction, "timestamp": Loader.construct_yaml_str}
    for tag, reader in readers.items():
        Loader.add_constructor(f"tag:yaml.org,2002:{tag}", reader)
    return Loader
