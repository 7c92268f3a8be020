"""Every value of YAML, JSON and TOML is where its span says; what cannot be read is one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from planner.read.documents import Files, parse_config, read_source
from planner.read.form import Setting, Source

YAML = """\
base: &base
  rank: 8   # a comment
model: "org/name"
lists: [1, 2]
empty:
nested:
  <<: *base
  rate: 1e-5
data:
  - path: one
  - path: two
"""
JSON = '{"a": {"b": [1, 2], "c": "x\\"y"},\n "l": [{"k": true}, 3, {"k": null}], "e": {}, "n": 5e8}'
TOML = 'title = "x"\n[training]\nsteps = 10 # comment\nname = "llama"\n[a.b]\nflag = true\n'


def settings(name: str, text: str) -> dict[str, Setting]:
    return {item.key: item for item in parse_config(Source(path=name, text=text))[0]}


def test_yaml() -> None:
    items = settings("x.yaml", YAML)
    assert {key: item.value for key, item in items.items()} == {
        "base.rank": 8,
        "model": "org/name",
        "lists": [1, 2],
        "empty": None,
        "nested.rank": 8,
        "nested.rate": "1e-5",
        "data.0.path": "one",
        "data.1.path": "two",
    }
    assert items["data.1.path"].line == 11
    assert YAML[items["model"].start : items["model"].end] == '"org/name"'
    assert YAML[items["base.rank"].start : items["base.rank"].end] == "8"


def test_json() -> None:
    items = settings("x.json", JSON)
    assert {key: item.value for key, item in items.items()} == {
        "a.b": [1, 2],
        "a.c": 'x"y',
        "l.0.k": True,
        "l.2.k": None,
        "e": {},
        "n": 5e8,
    }
    assert [JSON[item.start : item.end] for item in items.values()] == [
        "[1, 2]",
        '"x\\"y"',
        "true",
        "null",
        "{}",
        "5e8",
    ]
    assert items["l.0.k"].line == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_toml() -> None:
    items = settings("x.toml", TOML)
    assert {key: item.value for key, item in items.items()} == {
        "title": "x",
        "training.steps": 10,
        "training.name": "llama",
        "a.b.flag": True,
    }
    assert TOML[items["training.steps"].start : items["training.steps"].end] == "10"
    assert items["a.b.flag"].line == 6


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.yaml", "a: 1\n\tb: 2\n", ("line 2",)),
        ("x.yaml", "a:\n\t- b\n", ("line 2", "tab")),
        ("x.yaml", "a: 1\n  b: 2\n", ("line 2", "not YAML")),
        ("x.yaml", "a: 1\n---\nb: 2\n", ("line 2", "second document")),
        ("x.yaml", "a: !!python/object/apply:os.system ['true']\n", ("line 1", "python/object")),
        ("x.yaml", "a: !!python/name:os.system\n", ("python/name",)),
        ("x.yaml", "a: !env HOME\n", ("!env",)),
        ("x.yaml", "- a\n- b\n", ("no mapping",)),
        ("x.yaml", "a: 'open\n", ("not YAML",)),
        ("x.yaml", "a: " + "[" * 100 + "]" * 100, ("nested",)),
        ("x.yaml", "a: &a [1]\nb: *c\n", ("line 2", "undefined alias")),
        ("x.json", '{"a": 1,}', ("not JSON", "line 1")),
        ("x.json", '{"a": 1, "a": 2}', ("'a' twice",)),
        ("x.json", "[1]", ("no object",)),
        ("x.json", '{"a": NaN}', ("finite",)),
        ("x.json", '{"a": // b\n 1}', ("not JSON",)),
    ],
)
def test_refused(name: str, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(BrokenFile) as refusal:
        parse_config(Source(path=name, text=text))
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


def test_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large.yaml").write_text("a: 1\n" * 300_000)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.sh").write_text("\n")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name, words in (
        ("fifo", "no regular file"),
        ("large.yaml", "larger than 1 MiB"),
        ("binary.yaml", "UTF-8"),
        ("empty.sh", "is empty"),
        ("missing.yaml", "No such file"),
        ("loop.yaml", "cannot be read"),
        ("", "is a folder"),
    ):
        with pytest.raises(BrokenFile, match=words):
            read_source(tmp_path / name)


def test_includes_stay_inside(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (inner / "inside.json").write_text('{"a": 1}')
    (inner / "link.json").symlink_to(tmp_path / "outside.json")
    near = Source(path=str(inner / "train.yaml"), text="a: 1")
    files = Files([])
    source, _ = files.find("inside.json", near)
    assert source is not None
    assert source.text == '{"a": 1}'
    for name in ("../outside.json", str(tmp_path / "outside.json"), "link.json"):
        source, reason = files.find(name, near)
        assert source is None, name
        assert "outside" in reason
    assert files.find("none.json", near)[1].startswith("is not there")
