"""YAML, JSON and TOML as settings: every leaf with its line and the span of its value, so that it can be replaced.

Texts are parsed and never constructed: a tag such as `!!python/object` is refused, whatever it would make.
"""

from __future__ import annotations

import codecs
import json
import re
import stat
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile
from hardware_db.handed_in import parse_json, quote, quote_path
from planner.read.form import Setting, Source

MOST_BYTES = 2**20
"""No training config is larger; PyYAML takes seconds for this much."""
MOST_SETTINGS = 20_000
MOST_DEPTH = 60
REMEDY = "correct it there"


def read_source(path: Path) -> Source:
    """Return the text of a file.

    Raises:
        BrokenFile: it is no regular file (a FIFO would never end), cannot be read, is over 1 MiB, or is no UTF-8 text.
    """
    shown = quote_path(path)
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise BrokenFile(shown, "is a folder", "name the files in it that make one training, or the folder alone")
        if not stat.S_ISREG(kind):
            raise BrokenFile(shown, "is no regular file", "copy what it gives into a file and name that")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise BrokenFile(shown, f"cannot be read ({problem.strerror})", "name a config or a script") from None
    except ValueError:
        raise BrokenFile(shown, "cannot be read (a path holds no NUL character)", "name a config or a script") from None
    if len(content) > MOST_BYTES:
        raise BrokenFile(shown, f"is larger than {MOST_BYTES // 2**20} MiB", "name the config, not the data")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # of UTF-32 little-endian too
            raise BrokenFile(shown, "is text in UTF-16 or UTF-32", "save it as UTF-8") from None
        raise BrokenFile(shown, f"is not text in UTF-8 (byte {problem.start})", "name a config or a script") from None
    return _checked(Source(path=str(path), text=text), shown)


def handed_in(name: str, text: str) -> Source:
    """Return a text that somebody hands in under a name; no file of this machine is looked at for it.

    Raises:
        BrokenFile: it is over 1 MiB, or is no text.
    """
    shown = quote_path(Path(name))
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise BrokenFile(shown, f"is larger than {MOST_BYTES // 2**20} MiB", "name the config, not the data")
    if "\ufffd" in text:  # of a browser, for bytes that are no UTF-8
        raise BrokenFile(shown, "is not text in UTF-8", "name a config or a script")
    return _checked(Source(path=shown, text=text.removeprefix("\ufeff"), reach="nowhere"), shown)


def _checked(source: Source, shown: str) -> Source:
    if "\0" in source.text:
        raise BrokenFile(shown, "holds NUL characters", "name a config or a script")
    if not source.text.strip():
        raise BrokenFile(shown, "is empty", "name a config or a script")
    return source


def parse_config(source: Source) -> tuple[list[Setting], str]:
    """Return the settings of a config, and the syntax that it is in: json, toml or yaml.

    Raises:
        BrokenFile: it is none of them, or holds what this module refuses.
    """
    begins = source.text.lstrip()[:1]
    suffix = Path(source.path).suffix.lower()
    if suffix in (".json", ".jsonc") or (begins == "{" and suffix not in (".yaml", ".yml", ".toml")):
        return parse_json_settings(source), "json"
    if suffix == ".toml" or (suffix not in (".yaml", ".yml") and _TABLE.search(source.text)):
        return parse_toml_settings(source), "toml"
    return parse_yaml_settings(source), "yaml"


_TABLE = re.compile(r"^\[[A-Za-z_][\w.]*\]\s*(#.*)?$", re.MULTILINE)


# YAML, by PyYAML's nodes, which know their places.


def parse_yaml_settings(source: Source) -> list[Setting]:
    """Return the settings of a YAML text.

    Raises:
        BrokenFile: it is no YAML, no mapping, has more than one document, a tag, or is nested too deep.
    """
    import yaml

    tab = re.search(r"^ *\t[ \t]*[^\s#]", source.text, re.MULTILINE)
    try:
        root = yaml.compose(source.text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = 0 if mark is None else mark.line + 1
        if "single document" in str(problem.context):
            raise _refuse(source, "has a second document", line, "check each document in a file of its own") from None
        if tab and "\\t" in str(problem.problem):
            raise _refuse(source, "is indented by a tab", line, "indent YAML by spaces") from None
        raise _refuse(source, f"is not YAML ({problem.problem})", line, REMEDY) from None
    except yaml.YAMLError as problem:
        raise BrokenFile(source.path, f"is not YAML ({' '.join(str(problem).split())})", REMEDY) from None
    except RecursionError:
        raise BrokenFile(source.path, f"is nested more than {MOST_DEPTH} deep", REMEDY) from None
    _check_size(source, root)
    if not isinstance(root, yaml.MappingNode):
        raise BrokenFile(source.path, "is no mapping of keys to values", "name a trainer's config or a script")
    return list(_bounded(source, _walk_yaml(source, root, "", 0)))


_MOST_NODES = 20 * MOST_SETTINGS
"""Of a YAML text with every alias written out; of 1 MiB without aliases there are fewer."""


def _check_size(source: Source, root: Any) -> None:
    """Refuse a text whose aliases write out to more than can be walked, and one that holds itself."""
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any, depth: int) -> int:
        if depth > MOST_DEPTH:
            raise BrokenFile(source.path, f"is nested more than {MOST_DEPTH} deep", REMEDY)
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in sizes:
            parts = (
                node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
            )
            sizes[id(node)] = 1 + sum(size(part, depth + 1) for part in parts)
        return sizes[id(node)]

    if size(root, 0) > _MOST_NODES:
        raise BrokenFile(source.path, "repeats itself by aliases without end", "write its values out")


def _bounded(source: Source, settings: Iterator[Setting]) -> Iterator[Setting]:
    for count, setting in enumerate(settings):
        if count == MOST_SETTINGS:
            raise BrokenFile(source.path, f"holds more than {MOST_SETTINGS:,} values", "name the config, not the data")
        yield setting


def _walk_yaml(source: Source, node: Any, prefix: str, depth: int) -> Iterator[Setting]:
    """Yield the leaves of a mapping; a list of plain values is one."""
    import yaml

    if depth > MOST_DEPTH:
        raise BrokenFile(source.path, f"is nested more than {MOST_DEPTH} deep", REMEDY)
    for key_node, value in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refuse(source, "has a key that is no plain word", key_node.start_mark.line + 1, REMEDY)
        _check_tag(source, value)
    own = {key.value for key, _ in node.value}
    yield from _walk_merged(source, node, prefix, depth, own)
    for key_node, value in node.value:
        if key_node.tag.endswith(":merge"):
            continue
        key = f"{prefix}{key_node.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _walk_yaml(source, value, f"{key}.", depth + 1)
        elif isinstance(value, yaml.SequenceNode) and any(isinstance(item, yaml.MappingNode) for item in value.value):
            for number, item in enumerate(value.value):
                if isinstance(item, yaml.MappingNode):
                    yield from _walk_yaml(source, item, f"{key}.{number}.", depth + 1)
        else:
            yield Setting(
                key=key,
                value=_yaml_value(source, value, depth),
                source=source,
                line=key_node.start_mark.line + 1,
                start=value.start_mark.index,
                end=value.end_mark.index,
            )


def _walk_merged(source: Source, node: Any, prefix: str, depth: int, own: set[str]) -> Iterator[Setting]:
    """Yield what a mapping merges by `<<`, but for the keys that it has itself."""
    import yaml

    for key_node, value in node.value:
        if not key_node.tag.endswith(":merge"):
            continue
        for merged in value.value if isinstance(value, yaml.SequenceNode) else (value,):
            if isinstance(merged, yaml.MappingNode):
                leaves = _walk_yaml(source, merged, prefix, depth + 1)
                yield from (leaf for leaf in leaves if leaf.key[len(prefix) :].partition(".")[0] not in own)


def _yaml_value(source: Source, node: Any, depth: int) -> Any:
    import yaml

    _check_tag(source, node)
    if depth > MOST_DEPTH:
        raise BrokenFile(source.path, f"is nested more than {MOST_DEPTH} deep", REMEDY)
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(source, item, depth + 1) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {}
    return _plain_value(node.tag.rpartition(":")[2], node.value)


def _plain_value(tag: str, text: str) -> Any:
    """Return a scalar's value; a number in another notation than decimal digits stays the text that it is."""
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() in ("true", "yes", "on")
    if tag == "int" and re.fullmatch(r"[-+]?[0-9_]{1,300}", text) and not re.match(r"[-+]?0[0-9]", text):
        return int(text)
    if tag == "float" and ":" not in text:
        try:
            return float(text)
        except ValueError:
            return text
    return text


_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "map", "seq", "merge", "timestamp", "value")
)


def _check_tag(source: Source, node: Any) -> None:
    if node.tag not in _PLAIN_TAGS:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        problem = f"has the tag {quote(tag)}, which nothing here carries out"
        raise _refuse(source, problem, node.start_mark.line + 1, "write plain values")


def _refuse(source: Source, problem: str, line: int, remedy: str) -> BrokenFile:
    return BrokenFile(f"{source.path}, line {line}" if line else source.path, problem, remedy)


# JSON: read by the standard library, then walked once more for the places.


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def parse_json_settings(source: Source) -> list[Setting]:
    """Return the settings of a JSON text.

    Raises:
        BrokenFile: it is no JSON, no object, or nested too deep.
    """
    document = parse_json(source.text, source.path, REMEDY)
    if not isinstance(document, dict):
        raise BrokenFile(source.path, "is no object of keys and values", "name a trainer's config or a script")
    tokens = [(match.group(), match.start(), match.end()) for match in _TOKEN.finditer(source.text)]
    tokens.reverse()
    return list(_bounded(source, _walk_json(source, document, tokens, "")))


def _walk_json(source: Source, value: Any, tokens: list[tuple[str, int, int]], prefix: str) -> Iterator[Setting]:
    """Yield the leaves of an object whose `{` is the next token."""
    tokens.pop()
    for key, item in value.items():
        line = source.line_of(tokens.pop()[1])
        tokens.pop()  # the colon
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item:
            yield from _walk_json(source, item, tokens, f"{name}.")
        elif isinstance(item, list) and any(isinstance(part, dict) for part in item):
            tokens.pop()
            for number, part in enumerate(item):
                if isinstance(part, dict) and part:
                    yield from _walk_json(source, part, tokens, f"{name}.{number}.")
                else:
                    _skip_json(tokens)
                tokens.pop()  # a comma, or what closes the list
        else:
            start = tokens[-1][1]
            yield Setting(key=name, value=item, source=source, line=line, start=start, end=_skip_json(tokens))
        if tokens[-1][0] == ",":
            tokens.pop()
    tokens.pop()


def _skip_json(tokens: list[tuple[str, int, int]]) -> int:
    """Pass over one value, and return where it ends."""
    depth = 0
    while True:
        token, _, end = tokens.pop()
        depth += (token in "{[") - (token in "}]")
        if depth == 0:
            return end


# TOML: read by the standard library, places by the lines that tables and keys stand in.


def parse_toml_settings(source: Source) -> list[Setting]:
    """Return the settings of a TOML text.

    Raises:
        BrokenFile: it is no TOML, or this Python has no reader of it.
    """
    try:
        tomllib = import_module("tomllib")
    except ImportError:
        raise BrokenFile(source.path, "is TOML, which Python reads from 3.11 on", "use a newer Python") from None
    try:
        document = tomllib.loads(source.text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as problem:
        raise BrokenFile(source.path, f"is not TOML ({' '.join(str(problem).split())})", REMEDY) from None
    spans = _toml_spans(source.text)
    return list(_bounded(source, _walk_toml(source, document, spans, "")))


def _walk_toml(
    source: Source, table: dict[str, Any], spans: dict[str, tuple[int, int, int]], prefix: str
) -> Iterator[Setting]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _walk_toml(source, value, spans, f"{name}.")
            continue
        line, start, end = spans.get(name, (1, -1, -1))
        plain = value if isinstance(value, bool | int | float | str | list) else str(value)
        yield Setting(key=name, value=plain, source=source, line=line, start=start, end=end)


def _toml_spans(text: str) -> dict[str, tuple[int, int, int]]:
    """Return line, start and end of every value that stands on one line behind its key."""
    spans, table, offset = {}, "", 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if heading := re.match(r"\s*\[+([^\]]+)\]+", line):
            table = f"{heading[1].strip()}."
        elif pair := re.match(r"""\s*([\w."'-]+)\s*=\s*("[^"]*"|'[^']*'|[^#\n]*[^#\s])""", line):
            key = pair[1].replace('"', "").replace("'", "")
            spans[f"{table}{key}"] = (number, offset + pair.start(2), offset + pair.end(2))
        offset += len(line)
    return spans


def as_text(value: Any, syntax: str) -> str:
    """Return a value as a config in a syntax has it."""
    if syntax == "json" or isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    return json.dumps(value) if syntax == "toml" and isinstance(value, str) else str(value)


class Files:
    """Files that configs name: those that were given beside them, and those inside of their own folders.

    A path that leads out of the folder of the file that names it, and out of the working directory where that holds the
    file, is not followed, links included; what a command on the command line names is the person's own. Of a text that
    was handed in no path is followed.
    """

    def __init__(self, given: list[Source], written: dict[str, Source] | None = None) -> None:
        self.given = {Path(source.path).name: source for source in given if source.is_file}
        self.written = written or {}
        self.opened: list[Source] = []

    def find(self, name: str, near: Source) -> tuple[Source | None, str]:
        """Return the file of a name, or why there is none."""
        if name in self.written:
            return self.written[name], ""
        if Path(name).name in self.given:
            return self.given[Path(name).name], ""
        if near.reach == "nowhere":
            return None, "is not there; hand it in beside this one"
        working = Path.cwd().resolve()
        folder = near.folder.resolve()
        roots = [folder, working] if folder.is_relative_to(working) else [folder]
        reason = "is not there; name it on the command line too"
        for base in roots if near.reach == "folder" else [working]:
            try:
                path = (base / name).resolve()
                if near.reach == "folder" and not any(path.is_relative_to(root) for root in roots):
                    reason = "lies outside of its folder; name it on the command line too"
                elif path.is_file():
                    source = read_source(path)
                    shown = path.relative_to(working) if path.is_relative_to(working) else path
                    source = Source(path=str(shown), text=source.text)
                    self.opened.append(source)
                    return source, ""
            except (OSError, ValueError, RuntimeError):
                continue
        return None, reason
